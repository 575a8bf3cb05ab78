"""What vLLM knows of a request, in kvferry's words."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvferry.proto.errors import ModelError
from kvferry.proto.extra_keys import LoraKey, MultimodalItem, PromptEmbeds, RequestKeys


def keys_of(request: Any) -> RequestKeys | None:
    """Return what the request's blocks depend on besides its tokens; None: it cannot be shared.

    That is a prompt in which embeddings and tokens are mixed.

    Raises:
        ModelError: an adapter whose files cannot be read.
    """
    embeds = request.prompt_embeds
    if embeds is not None and getattr(request, "prompt_is_token_ids", None) is not None:
        return None
    return RequestKeys(
        lora=None if request.lora_request is None else _lora_key(request.lora_request),
        # vLLM takes an empty salt for none.
        salt=request.cache_salt or None,
        multimodal=tuple(
            MultimodalItem(
                identifier=item.identifier,
                offset=item.mm_position.offset,
                length=item.mm_position.length,
            )
            for item in request.mm_features or ()
        ),
        prompt_embeds=None if embeds is None else _embeds_key(embeds),
    )


def _lora_key(lora: Any) -> LoraKey:
    path = str(getattr(lora, "lora_path", "") or "")
    return LoraKey(name=lora.lora_name, path="", version=_version_of(path))


def _version_of(path: str) -> str:
    """Return a digest of an adapter's files, or its path where it is no folder here."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    try:
        return _digest(_stats_of(folder))
    except OSError as error:
        raise ModelError("the files of an adapter cannot be read", given=str(error)) from error


def _stats_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    config = folder / "adapter_config.json"
    return tuple(
        (str(file), file.stat().st_size, file.stat().st_mtime_ns)
        for file in (config, *files)
        if file.is_file()
    )


@cache
def _digest(stats: tuple[tuple[str, int, int], ...]) -> str:
    digest = xxhash.xxh3_128()
    for name, size, _ in stats:
        digest.update(size.to_bytes(8, "big"))
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def _embeds_key(embeds: torch.Tensor) -> PromptEmbeds:
    flat = embeds.detach().cpu().contiguous()
    raw = flat.view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(raw=raw, bytes_per_token=len(raw) // len(flat))
