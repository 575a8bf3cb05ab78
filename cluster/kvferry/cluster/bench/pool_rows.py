"""kvferry's cache manager against vLLM's, on the same operations in turn."""

from collections.abc import Iterator

from kvferry.cluster.bench.core_adapter import KvferryManager
from kvferry.cluster.bench.pool_operations import PoolOperations
from kvferry.cluster.bench.rows import Row, rounds, row_of_pairs
from kvferry.cluster.bench.vllm_process import VllmProcess

MEMORY_BLOCKS = 1_000_000
_SIZES = {256: "", 1: "@1"}
"""Blocks of a request, and what that adds to a row's name."""


def pool_rows(vllm: VllmProcess, seconds: float) -> Iterator[Row]:
    """Yield `lookup_block`, `allocate_block`, `free_block` and the same with `@1`, ns per block."""
    ours = PoolOperations(KvferryManager)
    for num_blocks, suffix in _SIZES.items():
        ours.time_cycle(num_blocks)  # the first one makes the pool
        vllm.ask("time_cycle", num_blocks)
        pairs = [
            (ours.time_cycle(num_blocks), vllm.ask("time_cycle", num_blocks))
            for _ in rounds(seconds)
        ]
        for operation in ("lookup", "allocate", "free"):
            yield row_of_pairs(
                f"{operation}_block{suffix}",
                [(mine[operation], other[operation]) for mine, other in pairs],
                "vllm",
                unit="ns",
            )


def memory_rows(vllm: VllmProcess) -> Iterator[Row]:
    """Yield `memory_block` (an empty pool) and `memory_block@hashed`, bytes per block.

    What Python has allocated, counted once: it does not vary.
    """
    mine = PoolOperations(KvferryManager).measure_memory(MEMORY_BLOCKS)
    other = vllm.ask("measure_memory", MEMORY_BLOCKS)
    for state, suffix in (("empty", ""), ("hashed", "@hashed")):
        yield row_of_pairs(f"memory_block{suffix}", [(mine[state], other[state])], "vllm", unit="B")
