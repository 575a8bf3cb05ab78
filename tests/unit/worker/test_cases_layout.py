"""Known failures between memories of other orders, each as a test; the number names the case."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.unit.worker.reshard_by_loops import kv_memories, storages_of

from kvferry.proto.layout import grid
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import plan_reshard
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.reshard_io import destination_cells, gather, scatter, source_cells

BLOCK_TOKENS, HEAD_SIZE, NUM_BLOCKS = 4, 2, 4
NUM_TOKENS = 2 * BLOCK_TOKENS
SHAPE = KvShape(num_layers=1, num_kv_heads=4, head_size=HEAD_SIZE, dtype="float32")
TABLES = [np.array([2, 1]), np.array([3, 1])]
"""Blocks of the sequence at the producer, and on both ranks of the consumer."""

ORDERS = ["LSBNH", "LBSNH", "LBSHN"]
"""[K/V][block][token][head], [block][K/V][token][head] and [block][K/V][head][token]."""


def value(side: int, head: int, position: int) -> int:
    """K = 1000 + 100 * head + token, V = 2000 + 100 * head + token."""
    return 1000 * (side + 1) + 100 * head + position


def as_side_block_token_head(memory: KvMemory) -> torch.Tensor:
    """View a rank's bytes by what its order says in words, without any strides."""
    (group,), (storage,) = memory.groups, storages_of(memory)
    sizes = {"S": 2, "B": NUM_BLOCKS, "N": BLOCK_TOKENS, "H": len(group.heads)}
    axes = memory.layout.memory.removeprefix("L")
    nested = torch.from_numpy(storage).view(torch.float32)
    nested = nested.view(*(sizes[axis] for axis in axes), HEAD_SIZE)
    return nested.permute(*(axes.index(axis) for axis in "SBNH"), 4)


def put(rank: torch.Tensor, table: npt.NDArray[np.int64], heads: range) -> None:
    """Write the sequence of some heads into a rank's memory, value by value."""
    for side, head, position in product((0, 1), heads, range(NUM_TOKENS)):
        block, token = divmod(position, BLOCK_TOKENS)
        rank[side, int(table[block]), token, head - heads.start] = value(side, head, position)


@pytest.mark.parametrize("producer", ORDERS)
@pytest.mark.parametrize("consumer", ORDERS)
def test_b30_each_rank_has_keys_and_values_of_its_own_heads_in_any_two_memory_orders(
    producer: str, consumer: str
) -> None:
    source = grid(block_tokens=BLOCK_TOKENS, memory=producer)
    destination = grid(block_tokens=BLOCK_TOKENS, tp=2, memory=consumer)
    (sender,) = kv_memories(source, SHAPE, NUM_BLOCKS).values()
    put(as_side_block_token_head(sender), TABLES[0], range(4))
    takers = kv_memories(destination, SHAPE, NUM_BLOCKS)
    plan = plan_reshard(source, destination, SHAPE, start=0, end=NUM_TOKENS)
    assert [(one.dst_rank, one.src_rank, one.heads) for one in plan.transfers] == [
        (0, 0, range(2)),
        (1, 0, range(2, 4)),
    ]
    for transfer in plan.transfers:
        payload = gather(sender.groups[0], TABLES[0], source_cells(transfer))
        taker = takers[transfer.dst_rank].groups[0]
        scatter(taker, TABLES[1], destination_cells(transfer), payload)
    for rank, heads in enumerate((range(2), range(2, 4))):
        wanted = torch.zeros(2, NUM_BLOCKS, BLOCK_TOKENS, 2, HEAD_SIZE)
        put(wanted, TABLES[1], heads)
        assert torch.equal(as_side_block_token_head(takers[rank]), wanted), f"rank {rank}"
