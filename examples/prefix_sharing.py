"""Two plain transformers engines share a long document's KV cache through kvferry.

    python examples/prefix_sharing.py --address 127.0.0.1:7000 --model path/to/a/model

Engine A reads the document and stores its KV. Engine B, with a cache of its own, is asked a
question about the same document: it fetches the document's KV, computes the question alone, and
must answer exactly as it does without kvferry. Needs a running service with a store of the model.
"""

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvferry.cluster.client import ModelCache, connect
from kvferry.proto.errors import KvferryError
from kvferry.worker.model.loading import ModelFacts, inspect_model

DOCUMENT = "The stations of the coastal line.\n" + "".join(
    f"Station {number} lies {7 * number + number % 5} km from the harbour.\n"
    for number in range(1, 61)
)
QUESTION = "Question: how far from the harbour is station 12? Answer: "
MAX_NEW_TOKENS = 24


class Engine:
    """A model, its tokenizer, and greedy generation; knows nothing of kvferry."""

    def __init__(self, facts: ModelFacts) -> None:
        # transformers' factories are typed in parts only.
        model_factory: Any = AutoModelForCausalLM
        tokenizer_factory: Any = AutoTokenizer
        self.tokenizer = tokenizer_factory.from_pretrained(facts.folder)
        self.model = model_factory.from_pretrained(facts.folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], cache: DynamicCache) -> int:
        """Compute what `cache` lacks of the tokens; return the next token."""
        rest = torch.tensor([token_ids[cache.get_seq_length() :]])
        return int(self.model(rest, cache=cache).logits[0, -1].argmax())

    def generate(self, token_ids: list[int], first: int, cache: DynamicCache) -> list[int]:
        """Return the greedy continuation that begins with `first`, the token after `token_ids`."""
        output = [first]
        while len(output) < MAX_NEW_TOKENS and output[-1] != self.tokenizer.eos_token_id:
            output.append(self.prefill(token_ids + output, cache))
        return output


def layers_of(cache: DynamicCache) -> list[torch.Tensor]:
    """Return the cache's tensors as kvferry has them: [2, num_tokens, num_kv_heads, head_size].

    transformers keeps K and V apart, each [1, num_kv_heads, num_tokens, head_size].
    """
    layers: Any = cache.layers
    return [torch.cat([layer.keys, layer.values]).transpose(1, 2) for layer in layers]


def fetch_cache(cached: ModelCache, token_ids: list[int]) -> DynamicCache:
    """Return a cache that holds the longest prefix of the tokens that kvferry has."""
    identity = cached.identity
    shape = (2, len(token_ids), identity.num_kv_heads, identity.head_size)
    layers = [torch.empty(shape) for _ in range(identity.num_layers)]
    # The last token is always computed: its logits choose the first new one.
    num_tokens = cached.fetch(token_ids[:-1], into=layers)
    cache = DynamicCache()
    if num_tokens:
        for index, layer in enumerate(layers):
            keys, values = layer[:, :num_tokens].transpose(1, 2).unsqueeze(1)
            cache.update(keys, values, index)
    return cache


def engine_a(address: str, facts: ModelFacts) -> None:
    """Read the document and store its KV."""
    with connect(address) as ferry:
        cached = ferry.model(facts.identity)
        engine, cache = Engine(facts), DynamicCache()
        document = engine.tokenizer.encode(DOCUMENT)
        started = time.perf_counter()
        engine.prefill(document, cache)
        elapsed_s = time.perf_counter() - started
        num_held = cached.store(document, layers_of(cache))
    print(f"engine A: computed {len(document)} tokens in {elapsed_s:.3f} s, {num_held} are held")


def engine_b(address: str, facts: ModelFacts) -> bool:
    """Answer the question with and without kvferry; return whether the answers are equal."""
    engine = Engine(facts)
    question = engine.tokenizer.encode(QUESTION, add_special_tokens=False)
    prompt = engine.tokenizer.encode(DOCUMENT) + question
    with connect(address) as ferry:
        cached = ferry.model(facts.identity)
        started = time.perf_counter()
        cache = fetch_cache(cached, prompt)
        num_fetched = cache.get_seq_length()
        first = engine.prefill(prompt, cache)
        shared_s = time.perf_counter() - started
    shared = engine.generate(prompt, first, cache)
    cache = DynamicCache()
    started = time.perf_counter()
    first = engine.prefill(prompt, cache)
    alone_s = time.perf_counter() - started
    alone = engine.generate(prompt, first, cache)
    print(f"engine B: fetched {num_fetched} of {len(prompt)} tokens; its first token came after")
    print(f"  {shared_s:.3f} s with kvferry:    {engine.tokenizer.decode(shared)!r}")
    print(f"  {alone_s:.3f} s without kvferry: {engine.tokenizer.decode(alone)!r}")
    return shared == alone


def main() -> int:
    """Run both engines; return the exit code (1: the answers differ)."""
    parser = argparse.ArgumentParser(description="Two engines share a prefix through kvferry.")
    parser.add_argument("--address", required=True, help="host:port of the control front")
    parser.add_argument("--model", required=True, help="model folder or hub id, as the service has")
    args = parser.parse_args()
    try:
        facts = inspect_model(args.model)
        engine_a(args.address, facts)
        equal = engine_b(args.address, facts)
    except KvferryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("the answers are equal" if equal else "the answers DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
