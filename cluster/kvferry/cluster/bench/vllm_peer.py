"""vLLM's side of a comparison: a script for an interpreter that has vLLM and no kvferry.

Reads one JSON object per line from stdin and answers each with one on stdout:
`{"call": "time_cycle" | "measure_memory", "num_blocks": n}`; the first line it writes is
`{"vllm": version}`. What vLLM itself prints goes to stderr.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

# Transformers loads them where they are installed. The cache core uses neither, and the usual ones
# do not load beside a CPU build of torch.
_NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")


def _load_operations() -> Any:
    """Return the module beside this file, which cannot be imported by its name here."""
    path = Path(__file__).with_name("pool_operations.py")
    spec = importlib.util.spec_from_file_location("pool_operations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class VllmManager:
    """See `pool_operations.Manager`."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        core: Any = importlib.import_module("vllm.v1.core.kv_cache_manager")
        torch: Any = importlib.import_module("torch")
        spec = interface.FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self._block_tokens = block_tokens
        self._request: Any = importlib.import_module("vllm.v1.request").Request
        self._sampling: Any = importlib.import_module("vllm.sampling_params").SamplingParams(
            max_tokens=1
        )
        self._manager: Any = core.KVCacheManager(
            interface.KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=1 << 20,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
        )

    def make_request(self, name: str, hashes: list[bytes]) -> Any:
        """See `Manager.make_request`."""
        tokens = [0] * (len(hashes) * self._block_tokens + 1)
        request = self._request(name, tokens, self._sampling, None)
        request.block_hashes = hashes
        return request

    def lookup(self, request: Any) -> int:
        """See `Manager.lookup`."""
        num_tokens: int = self._manager.get_computed_blocks(request)[1]
        return num_tokens

    def allocate(self, request: Any) -> bool:
        """See `Manager.allocate`."""
        num_tokens = request.num_tokens - 1
        return self._manager.allocate_slots(request, num_tokens) is not None

    def free(self, request: Any) -> None:
        """See `Manager.free`."""
        self._manager.free(request)

    def settle(self) -> None:
        """See `Manager.settle`."""
        self._manager.new_step_starts()


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    operations = _load_operations()
    for name in _NOT_NEEDED:
        cast("dict[str, Any]", sys.modules)[name] = None
    version: str = importlib.import_module("vllm").__version__

    def make_manager(num_blocks: int) -> VllmManager:
        return VllmManager(num_blocks, operations.BLOCK_TOKENS)

    pool = operations.PoolOperations(make_manager)
    print(json.dumps({"vllm": version}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        figures = getattr(pool, asked["call"])(asked["num_blocks"])
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main()
