"""Known failures between memories of other orders, each as a test; the number names the case."""

from itertools import product

import numpy as np
import pytest
import torch
from tests.builders import make_identity
from tests.unit.proto.strides import strides_of
from tests.unit.proto.token_positions import destination_tokens, source_tokens

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout, grid
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import plan_reshard
from kvferry.worker.device import open_device
from kvferry.worker.kv_memory import KvMemory

NUM_HEADS, BLOCK_TOKENS, HEAD_SIZE, NUM_BLOCKS = 4, 4, 2, 4
NUM_TOKENS = 2 * BLOCK_TOKENS
SHAPE = KvShape(num_layers=1, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float32")
TABLES = [[2, 1], [3, 1]]
"""Blocks of the sequence at the producer, and on both ranks of the consumer."""

ORDERS = ["LSBNH", "LBSNH", "LBSHN"]
"""[K/V][block][token][head], [block][K/V][token][head] and [block][K/V][head][token]."""


def value(side: int, head: int, position: int) -> int:
    """K = 1000 + 100 * head + token, V = 2000 + 100 * head + token."""
    return 1000 * (side + 1) + 100 * head + position


def as_side_block_token_head(storage: torch.Tensor, order: str, num_heads: int) -> torch.Tensor:
    """View a rank's bytes by what the order says in words, without any strides."""
    sizes = {"S": 2, "B": NUM_BLOCKS, "N": BLOCK_TOKENS, "H": num_heads}
    axes = order.removeprefix("L")
    nested = storage.view(*(sizes[axis] for axis in axes), HEAD_SIZE)
    return nested.permute(*(axes.index(axis) for axis in "SBNH"), 4)


def by_strides(storage: torch.Tensor, order: str, num_heads: int) -> torch.Tensor:
    """View a rank's bytes by the strides of its order, as whoever moves them does."""
    strides = strides_of(
        order,
        num_layers=1,
        num_sides=2,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        num_heads=num_heads,
        head_bytes=HEAD_SIZE * 4,
    )
    steps = (strides.side_bytes, strides.block_bytes, strides.token_bytes, strides.head_bytes)
    return storage.as_strided(
        (2, NUM_BLOCKS, BLOCK_TOKENS, num_heads, HEAD_SIZE), (*(step // 4 for step in steps), 1)
    )


def storage_of(num_heads: int) -> torch.Tensor:
    return torch.zeros(2 * NUM_BLOCKS * BLOCK_TOKENS * num_heads * HEAD_SIZE)


def put(rank: torch.Tensor, table: list[int], heads: range) -> None:
    """Write the sequence of some heads into a rank's memory, value by value."""
    for side, head, position in product((0, 1), heads, range(NUM_TOKENS)):
        block, token = divmod(position, BLOCK_TOKENS)
        rank[side, table[block], token, head - heads.start] = value(side, head, position)


@pytest.mark.parametrize("producer", ORDERS)
@pytest.mark.parametrize("consumer", ORDERS)
def test_b30_each_rank_has_keys_and_values_of_its_own_heads_in_any_two_memory_orders(
    producer: str, consumer: str
) -> None:
    source = grid(block_tokens=BLOCK_TOKENS, memory=producer)
    destination = grid(block_tokens=BLOCK_TOKENS, tp=2, memory=consumer)
    sent = storage_of(NUM_HEADS)
    put(as_side_block_token_head(sent, producer, NUM_HEADS), TABLES[0], range(NUM_HEADS))
    ranks = [storage_of(NUM_HEADS // 2) for _ in range(2)]
    plan = plan_reshard(source, destination, SHAPE, start=0, end=NUM_TOKENS)
    assert [(one.dst_rank, one.src_rank, one.heads) for one in plan.transfers] == [
        (0, 0, range(2)),
        (1, 0, range(2, 4)),
    ]
    reader = by_strides(sent, producer, NUM_HEADS)
    for transfer in plan.transfers:
        writer = by_strides(ranks[transfer.dst_rank], consumer, NUM_HEADS // 2)
        heads = slice(transfer.heads.start, transfer.heads.stop)
        for runs in transfer.runs:
            here, there = source_tokens(runs), destination_tokens(runs)
            read = (np.array(TABLES[0])[here // BLOCK_TOKENS], here % BLOCK_TOKENS)
            written = (np.array(TABLES[1])[there // BLOCK_TOKENS], there % BLOCK_TOKENS)
            writer[:, *written] = reader[:, *read][:, :, heads]
    for rank, heads_here in enumerate((range(2), range(2, 4))):
        wanted = torch.zeros(2, NUM_BLOCKS, BLOCK_TOKENS, NUM_HEADS // 2, HEAD_SIZE)
        put(wanted, TABLES[1], heads_here)
        found = as_side_block_token_head(ranks[rank], consumer, NUM_HEADS // 2)
        assert torch.equal(found, wanted), f"rank {rank}"


@pytest.mark.parametrize("order", ORDERS[1:])
def test_b30_a_worker_refuses_a_memory_order_it_does_not_have_naming_both(order: str) -> None:
    layout = Layout(block_tokens=BLOCK_TOKENS, memory=order)
    with pytest.raises(ConfigError, match=f"given: {order}; allowed: LSBNH"):
        KvMemory(open_device("cpu"), make_identity(), num_blocks=NUM_BLOCKS, layout=layout)
