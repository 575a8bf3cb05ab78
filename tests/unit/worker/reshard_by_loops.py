"""What gathering and scattering by plan must do, by loops over every layer, token and head."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import numpy.typing as npt
from tests.builders import make_identity
from tests.unit.proto.reshard_reference import parts_of_ranks

from kvferry.proto.identity import Identity
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import AXES
from kvferry.proto.placement import KvShape, holdings
from kvferry.worker.device import open_device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.reshard_io import Cells
from kvferry.worker.selection import BlockTable

Dense = npt.NDArray[np.uint8]
"""Bytes; those of a whole sequence are [layers, 2, tokens, heads, head_bytes]."""


def identity_of(shape: KvShape) -> Identity:
    """An identity whose only group has the layers of the shape's group."""
    return make_identity(
        num_layers=len(shape.layers),
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        kv_dtype=shape.dtype,
    )


def kv_memories(layout: Layout, shape: KvShape, num_blocks: int) -> dict[int, KvMemory]:
    """The zeroed memory of each rank that holds layers of the group.

    It is that of a model that has the group's layers only, on the stages that have some.
    """
    stages = [
        sum(layer in stage for layer in shape.layers) for stage in layout.stages(shape.num_layers)
    ]
    own = replace(
        layout,
        pp=len(stages) - stages.count(0),
        stage_layers=tuple(filter(None, stages)),
    )
    ranks = [held.rank for held in holdings(layout, shape) if held.layers]
    return {
        rank: KvMemory(
            open_device("cpu"), identity_of(shape), num_blocks=num_blocks, layout=own, rank=own_rank
        )
        for own_rank, rank in enumerate(ranks)
    }


def random_table(random: Random, layout: Layout, num_tokens: int) -> BlockTable:
    """Blocks for so many tokens of the sequence, in any order."""
    count = -(-num_tokens // layout.virtual_block_tokens)
    return np.array(random.sample(range(1, count + 3), count), dtype=np.int64)


def fill(
    memories: dict[int, KvMemory],
    layout: Layout,
    shape: KvShape,
    table: BlockTable,
    *,
    dense: Dense,
    positions: range,
) -> None:
    """Write the positions of the sequence wherever the rules of docs/layouts.md put them."""
    parts = parts_of_ranks(layout, shape)
    num_shards = 1 + max(shard for _, _, shard in parts)
    for rank, memory in memories.items():
        layers, heads, shard = parts[rank]
        for position in positions:
            number, within = divmod(position, layout.block_tokens * num_shards)
            if within // layout.interleave % num_shards != shard:
                continue
            token = within // (num_shards * layout.interleave) * layout.interleave
            token += within % layout.interleave
            for layer, side, head in product(layers, (0, 1), heads):
                blocks = blocks_of(memory, layer, side)
                cell = blocks[table[number], token, head - heads.start]
                cell[:] = dense[layer, side, position, head]


def gather_by_loops(memory: KvMemory, table: BlockTable, cells: Cells) -> bytes:
    return b"".join(cell.tobytes() for cell in _cells_in_order(memory, table, cells))


def scatter_by_loops(memory: KvMemory, table: BlockTable, cells: Cells, payload: bytes) -> None:
    left = np.frombuffer(payload, dtype=np.uint8)
    for cell in _cells_in_order(memory, table, cells):
        cell[:], left = left[: len(cell)], left[len(cell) :]
    assert not len(left)


def bytes_of(memory: KvMemory) -> list[bytes]:
    return [storage.tobytes() for storage in storages_of(memory)]


def storages_of(memory: KvMemory) -> list[Dense]:
    """All memory of a rank: the keys of a storage's first layer begin where the storage does."""
    (group,) = memory.groups
    has_one = memory.layout.memory[0] != "L"
    return [np.asarray(keys) for keys, _ in group.sides[: 1 if has_one else None]]


def blocks_of(memory: KvMemory, layer: int, side: int) -> Dense:
    """One side of one layer as [num_blocks, block_tokens, heads, head_bytes].

    Taken from the letters of the order alone, not from strides.
    """
    (group,), order = memory.groups, memory.layout.memory
    storages = storages_of(memory)
    sizes = {
        "L": len(group.layers) // len(storages),
        "S": 2,
        "B": memory.num_blocks,
        "N": memory.layout.block_tokens,
        "H": len(group.heads),
    }
    number, within = divmod(layer - group.layers.start, sizes["L"])
    values = storages[number].reshape(*(sizes[axis] for axis in order), -1)
    sorted_values = values.transpose(*(order.index(axis) for axis in AXES), len(AXES))
    blocks: Dense = sorted_values[within, side]
    return blocks


def _cells_in_order(memory: KvMemory, table: BlockTable, cells: Cells) -> Iterator[Dense]:
    first_head = memory.groups[0].heads.start
    for layer, side, local, head in product(
        cells.layers, (0, 1), cells.tokens.tolist(), cells.heads
    ):
        number, token = divmod(local, memory.layout.block_tokens)
        yield blocks_of(memory, layer, side)[table[number], token, head - first_head]
