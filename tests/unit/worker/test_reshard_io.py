from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import make_identity
from tests.unit.proto.reshard_reference import MAX_TOKENS, random_pair
from tests.unit.worker.reshard_by_loops import (
    bytes_of,
    fill,
    gather_by_loops,
    kv_memories,
    random_table,
    scatter_by_loops,
    storages_of,
)

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.identity import GroupSpec
from kvferry.proto.layout import Layout, grid
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import plan_reshard
from kvferry.worker.device import open_device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.reshard_io import Cells, destination_cells, gather, scatter, source_cells

SHAPE = KvShape(num_layers=2, num_kv_heads=4, head_size=2, dtype="float32")
BEFORE = 0xEE


def filled(memories: dict[int, KvMemory]) -> dict[int, KvMemory]:
    for memory in memories.values():
        for storage in storages_of(memory):
            storage[:] = BEFORE
    return memories


def check_pair(
    source: Layout, destination: Layout, shape: KvShape, positions: range, random: Random
) -> None:
    """Move the positions both ways, by loops and fast; compare every byte of every rank."""
    tokens = max(positions.stop, 1)
    generator = np.random.default_rng(random.randrange(1 << 32))
    size = (len(shape.layers), 2, tokens, shape.num_kv_heads, shape.head_bytes)
    dense = generator.integers(0, 256, size, dtype=np.uint8)
    tables = [random_table(random, layout, tokens) for layout in (source, destination)]
    sender = kv_memories(source, shape, len(tables[0]) + 3)
    taker, slow, wanted = (
        filled(kv_memories(destination, shape, len(tables[1]) + 3)) for _ in range(3)
    )
    fill(sender, source, shape, tables[0], dense=dense, positions=positions)
    fill(wanted, destination, shape, tables[1], dense=dense, positions=positions)
    plan = plan_reshard(source, destination, shape, start=positions.start, end=positions.stop)
    for transfer in plan.transfers:
        read, written = source_cells(transfer), destination_cells(transfer)
        memory = sender[transfer.src_rank]
        payload = gather(memory.groups[0], tables[0], read)
        assert len(payload) == transfer.num_bytes
        assert bytes(payload) == gather_by_loops(memory, tables[0], read)
        scatter(taker[transfer.dst_rank].groups[0], tables[1], written, payload)
        scatter_by_loops(slow[transfer.dst_rank], tables[1], written, bytes(payload))
    for rank, memory in wanted.items():
        assert bytes_of(taker[rank]) == bytes_of(slow[rank]) == bytes_of(memory), f"rank {rank}"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_is_moved_by_plan_is_where_a_dense_reference_puts_it(seed: int) -> None:
    random = Random(seed)
    source, destination, shape, start, end = random_pair(random)
    # The memory keeps keys and values; MLA's latent alone has no place in it yet.
    check_pair(source, destination, replace(shape, mla=False), range(start, end), random)


@pytest.mark.parametrize("interleave", [1, 4])
def test_parts_of_a_rank_s_heads_are_moved(interleave: int) -> None:
    # 6 heads over 2 and over 3 shards: [2, 3) and [3, 4) are parts that begin anywhere.
    source = grid(block_tokens=4, tp=2, dcp=2, interleave=interleave, stage_layers=(2,))
    destination = grid(block_tokens=8, tp=3, pcp=3, interleave=2, stage_layers=(2,))
    shape = replace(SHAPE, num_kv_heads=6)
    check_pair(source, destination, shape, range(3, MAX_TOKENS), Random(0))


def test_a_table_that_begins_later_skips_the_tokens_before_it() -> None:
    source, destination = grid(block_tokens=4), grid(block_tokens=2, dcp=2)
    (memory,) = kv_memories(source, SHAPE, 6).values()
    for number, storage in enumerate(storages_of(memory)):
        storage[:] = np.arange(storage.size) % 251 + number
    first, second = plan_reshard(source, destination, SHAPE, start=9, end=14).transfers
    table = np.array([4, 1, 3, 5])
    assert source_cells(first).tokens.tolist() == [10, 12]
    assert source_cells(second, skipped_tokens=8).tokens.tolist() == [1, 3, 5]
    assert destination_cells(second, skipped_tokens=4).tokens.tolist() == [0, 1, 2]
    (group,) = memory.groups
    whole = gather(group, table, source_cells(second))
    assert gather(group, table[2:], source_cells(second, skipped_tokens=8)) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": range(1, 3)}, "no such layers here"),
        ({"layers": range(1, 1)}, "no such layers here"),
        ({"heads": range(0, 2)}, "no such heads here"),
        ({"tokens": np.array([0, 8])}, "no such tokens in the block table"),
        ({"tokens": np.array([], dtype=np.int64)}, "no such tokens in the block table"),
        ({"tokens": np.array([-1, 0])}, "no such tokens in the block table"),
    ],
)
def test_cells_that_are_not_here_are_refused(changes: dict[str, object], message: str) -> None:
    memory = kv_memories(grid(block_tokens=4, tp=2), SHAPE, 3)[1].groups[0]
    cells = Cells(layers=range(2), heads=range(2, 4), tokens=np.array([0, 7]))
    payload = gather(memory, np.array([2, 1]), cells)
    assert len(payload) == 2 * 2 * 2 * 2 * SHAPE.head_bytes
    with pytest.raises(BadInputError, match=message):
        gather(memory, np.array([2, 1]), replace(cells, **changes))  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="no such blocks here"):
        gather(memory, np.array([2, 3]), cells)
    with pytest.raises(BadInputError, match="the payload does not fill its cells"):
        scatter(memory, np.array([2, 1]), cells, payload[1:])


def test_a_rank_without_layers_of_a_group_has_no_memory() -> None:
    groups = (GroupSpec(kind="full", layers=(0,)), GroupSpec(kind="full", layers=(1,)))
    identity = make_identity(num_layers=2, groups=groups)
    with pytest.raises(ConfigError, match="sizes of a block must be positive"):
        KvMemory(
            open_device("cpu"), identity, num_blocks=2, layout=Layout(block_tokens=4, pp=2), rank=1
        )
