"""How fast a worker gathers and scatters what moves between two layouts, beside a plain copy."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from kvferry.cluster.bench.plan_rows import SHAPE
from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_pairs
from kvferry.proto.errors import InvariantError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.layout import Layout, grid
from kvferry.proto.reshard import plan_reshard
from kvferry.worker.arena import HostBytes
from kvferry.worker.device import open_device
from kvferry.worker.group_memory import GroupMemory
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.reshard_io import destination_cells, gather, scatter, source_cells
from kvferry.worker.selection import BlockTable

IDENTITY = Identity(
    model="bench",
    weight_version="1",
    weight_dtype=SHAPE.dtype,
    kv_dtype=SHAPE.dtype,
    kv_scales="",
    rope="",
    num_layers=SHAPE.num_layers,
    num_kv_heads=SHAPE.num_kv_heads,
    head_size=SHAPE.head_size,
    groups=(GroupSpec(kind="full", layers=tuple(range(SHAPE.num_layers))),),
)
NUM_TOKENS = 2_048
"""Tokens that one rank sends another; of 24 layers with 2 KV heads each, 48 MiB."""

# With tokens dealt one by one over 2 and over 3 ranks, a source rank reads every third of its own,
# and a destination rank writes every second.
LAYOUTS = {
    "aligned": (grid(block_tokens=16, tp=4), grid(block_tokens=32, tp=2)),
    "interleave1": (grid(block_tokens=16, tp=4, dcp=2), grid(block_tokens=32, tp=2, dcp=3)),
}


def move_rows(seconds: float) -> Iterator[Row]:
    """Yield `gather_*` and `scatter_*` of each pair of layouts, in GB/s of one transfer.

    Raises:
        InvariantError: what is scattered is not what was gathered.
    """
    for name, (source, destination) in LAYOUTS.items():
        move = Move(source, destination)
        for kind, work in (("gather", move.gather), ("scatter", move.scatter)):
            yield measure_pairs(
                f"{kind}_{name}",
                partial(_bytes_per_ns, move.num_bytes, work),
                "memcpy",
                partial(_bytes_per_ns, move.num_bytes, move.copy),
                unit="GB/s",
                seconds=seconds,
                better="higher",
            )


def _bytes_per_ns(num_bytes: int, work: Callable[[], object]) -> float:
    return num_bytes / elapsed_ns(work)


class Move:
    """The first transfer of a plan between two layouts, with the memories of its two ranks.

    Raises:
        InvariantError: what is scattered is not what was gathered.
    """

    def __init__(self, source: Layout, destination: Layout) -> None:
        end = NUM_TOKENS * source.token_shards * destination.token_shards
        transfer = plan_reshard(source, destination, SHAPE, start=0, end=end).transfers[0]
        self.num_bytes = transfer.num_bytes
        self._read, self._written = source_cells(transfer), destination_cells(transfer)
        self._from, self._from_table = _rank(source, transfer.src_rank, end)
        self._to, self._to_table = _rank(destination, transfer.dst_rank, end)
        self._payload = np.frombuffer(self.gather(), dtype=np.uint8)
        self._copy: HostBytes = np.zeros_like(self._payload)
        self.scatter()
        if gather(self._to, self._to_table, self._written) != self._payload.data:
            raise InvariantError("other bytes were scattered than gathered")

    def gather(self) -> memoryview:
        """Collect the transfer's bytes from the source rank's memory."""
        return gather(self._from, self._from_table, self._read)

    def scatter(self) -> None:
        """Spread them over the destination rank's memory."""
        scatter(self._to, self._to_table, self._written, self._payload.data)

    def copy(self) -> None:
        """Copy as many bytes that lie side by side, to where bytes have been before."""
        np.copyto(self._copy, self._payload)


def _rank(layout: Layout, rank: int, num_tokens: int) -> tuple[GroupMemory, BlockTable]:
    """Return a rank's memory, filled, and a table of so many tokens with its blocks in disorder."""
    num_blocks = -(-num_tokens // layout.virtual_block_tokens)
    memory = KvMemory(
        open_device("cpu"),
        IDENTITY,
        num_blocks=num_blocks + 1,
        layout=layout,
        rank=rank,
    )
    for layer in memory.layers:
        layer.view(torch.uint8).random_()
    return memory.groups[0], np.random.default_rng(rank).permutation(num_blocks) + 1
