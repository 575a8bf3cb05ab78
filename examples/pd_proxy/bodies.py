"""What the proxy reads in the body of a request, and the bodies that it sends instead."""

import json
from collections.abc import Mapping
from typing import Any

from kvferry.proto.errors import BadInputError
from kvferry.proto.extra_keys import LoraKey, RequestKeys
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import HashScheme

Body = Mapping[str, Any]

# The fields that decide the tokens of a prompt and that /tokenize has, too.
_TOKENIZED = (
    "model",
    "prompt",
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
# The fields that say how much is generated or how it is sent.
_NOT_PREFILLED = {
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "stream",
    "stream_options",
}


def read_body(raw: bytes) -> Body:
    """Return the object in a request's body, or an empty one if the body is none.

    An unreadable body is sent on like any other, for the server knows best what is wrong with it.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def token_ids_in(body: Body) -> list[int] | None:
    """Return the prompt if it is one list of token ids, as completions may have it."""
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    return prompt if is_ids else None


def tokenize_body(body: Body) -> Body | None:
    """Return what to ask /tokenize for a prompt; None for no prompt, embeddings, or several."""
    if "messages" not in body and not isinstance(body.get("prompt"), str):
        return None
    return {name: body[name] for name in _TOKENIZED if name in body}


def prompt_hashes(scheme: HashScheme, body: Body, token_ids: list[int]) -> tuple[BlockHash, ...]:
    """Return the hashes of a prompt's full blocks; none if the prompt is one no server takes.

    The pixels behind the tokens of an image are not in the hash. That may choose a server for
    nothing, but never gives a wrong answer: servers decide by their own hashes.
    """
    model, salt = body.get("model"), body.get("cache_salt")
    try:
        # The name may be that of an adapter, under which the same tokens have other KV.
        lora = None if model is None else LoraKey(name=model, path="")
        return hash_tokens(scheme, token_ids, RequestKeys(lora=lora, salt=salt))
    except BadInputError:
        return ()


def prefill_body(body: Body) -> Body:
    """Return the request for a prefill server: the same prompt, one token, all at once."""
    kept = {name: value for name, value in body.items() if name not in _NOT_PREFILLED}
    limit = "max_completion_tokens" if "messages" in body else "max_tokens"
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**kept, limit: 1, "stream": False, "kv_transfer_params": transfer}


def decode_body(body: Body, transfer: Body) -> Body:
    """Return the request for a decode server, with what the prefill server says of its blocks."""
    params = {**transfer, "do_remote_decode": False, "do_remote_prefill": True}
    return {**body, "kv_transfer_params": params}
