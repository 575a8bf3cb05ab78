from random import Random
from typing import Any

import numpy as np
import pytest
from tests.unit.proto.reshard_reference import Memories, check_pair
from tests.unit.proto.token_positions import destination_tokens, positions, source_tokens

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import Plan, Transfer, plan_reshard
from kvferry.proto.slot_mapping import NOT_HERE, slots
from kvferry.proto.token_runs import Loop, TokenRuns, shared_runs


def shape(kv_heads: int = 2, **changes: Any) -> KvShape:
    settings: dict[str, Any] = {"num_layers": 4, "head_size": 8, "dtype": "bfloat16"}
    return KvShape(num_kv_heads=kv_heads, **settings | changes)


ONE_RANK = Layout(block_tokens=4)


def senders(plan: Plan) -> list[tuple[int, int, int]]:
    """Return (destination rank, source rank, tokens) of every transfer."""
    return [(one.dst_rank, one.src_rank, one.num_tokens) for one in plan.transfers]


def test_equal_layouts_move_one_contiguous_run_from_each_rank_to_its_like() -> None:
    layout = grid(block_tokens=4, tp=2)
    plan = plan_reshard(layout, layout, shape(), start=0, end=1000)
    run = TokenRuns(first=0, source_first=0, destination_first=0, run_tokens=1000)
    assert plan.transfers == tuple(
        Transfer(
            dst_rank=rank,
            src_rank=rank,
            layers=range(4),
            heads=range(rank, rank + 1),
            runs=(run,),
            num_tokens=1000,
            num_bytes=4 * 2 * 1 * 16 * 1000,
        )
        for rank in range(2)
    )
    assert (plan.num_bytes, plan.waste_bytes) == (256_000, 0)


def test_a_strided_slice_holds_every_second_token_whatever_the_length() -> None:
    plan = plan_reshard(ONE_RANK, grid(block_tokens=2, dcp=2), shape(), start=0, end=131_072)
    loop = Loop(count=65_536, step=2, source_step=2, destination_step=1)
    assert [one.runs for one in plan.transfers] == [
        (
            TokenRuns(
                first=rank, source_first=rank, destination_first=0, run_tokens=1, loops=(loop,)
            ),
        )
        for rank in range(2)
    ]


def test_interleaves_that_nest_give_one_slice_with_two_loops() -> None:
    source = grid(block_tokens=4, dcp=2, interleave=4)
    runs = shared_runs(source, grid(block_tokens=4, dcp=2), 0, 800)
    assert runs[0, 1] == (
        TokenRuns(
            first=1,
            source_first=1,
            destination_first=0,
            run_tokens=1,
            loops=(
                Loop(count=100, step=8, source_step=4, destination_step=4),
                Loop(count=2, step=2, source_step=2, destination_step=1),
            ),
        ),
    )
    assert positions(runs[0, 1][0]).tolist()[:5] == [1, 3, 9, 11, 17]


def test_a_range_that_cuts_a_run_moves_the_rest_of_it() -> None:
    runs = shared_runs(ONE_RANK, grid(block_tokens=4, dcp=2, interleave=4), 6, 19)
    assert {pair: [positions(box).tolist() for box in boxes] for pair, boxes in runs.items()} == {
        (0, 0): [[8, 9, 10, 11], [16, 17, 18]],
        (0, 1): [[6, 7], [12, 13, 14, 15]],
    }
    assert [source_tokens(box).tolist() for box in runs[0, 1]] == [[6, 7], [12, 13, 14, 15]]
    assert [destination_tokens(box).tolist() for box in runs[0, 1]] == [[2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("seed", range(100))
def test_long_ranges_are_shared_out_as_the_slot_mapping_says(seed: int) -> None:
    random = Random(seed)

    def layout() -> Layout:
        interleave = random.choice([1, 2, 3, 4, 8, 16])
        rounds = random.randint(1, 4)
        pcp, dcp = random.randint(1, 4), random.randint(1, 4)
        return grid(block_tokens=interleave * rounds, pcp=pcp, dcp=dcp, interleave=interleave)

    source, destination = layout(), layout()
    start = random.randint(0, 3000)
    end = start + random.randint(0, 3000)
    seen = np.zeros(end, dtype=np.int64)
    for pair, boxes in shared_runs(source, destination, start, end).items():
        for box in boxes:
            dealt = positions(box)
            seen[dealt] += 1
            for one, shard, local in (
                (source, pair[0], source_tokens(box)),
                (destination, pair[1], destination_tokens(box)),
            ):
                mapping = slots(
                    range(end),
                    0,
                    end,
                    one.block_tokens,
                    rank=shard,
                    num_shards=one.token_shards,
                    interleave=one.interleave,
                )
                assert mapping[dealt].tolist() == local.tolist()
                assert NOT_HERE not in local
    assert seen.tolist() == [0] * start + [1] * (end - start)


def test_a_slice_count_does_not_grow_with_the_range() -> None:
    source = grid(block_tokens=16, dcp=4, interleave=16)
    destination = grid(block_tokens=6, pcp=3, interleave=2)
    counts = []
    for end in (2_000, 131_072):
        runs = shared_runs(source, destination, 5, end)
        assert sum(box.num_tokens for boxes in runs.values() for box in boxes) == end - 5
        counts.append(max(map(len, runs.values())))
    assert max(counts) <= 20


def test_replicas_are_asked_by_rank_number_and_otherwise_in_turn() -> None:
    replicated = grid(block_tokens=4, tp=4)
    same_numbers = plan_reshard(replicated, replicated, shape(1), start=0, end=8)
    assert senders(same_numbers) == [(rank, rank, 8) for rank in range(4)]
    fewer = plan_reshard(grid(block_tokens=4, tp=2), replicated, shape(1), start=0, end=8)
    assert senders(fewer) == [(0, 0, 8), (1, 1, 8), (2, 0, 8), (3, 1, 8)]
    assert fewer.waste_bytes == 3 * 8 * 4 * 2 * 16


def test_the_latent_of_mla_is_replicated_over_tp_and_dealt_by_dcp() -> None:
    latent = shape(1, mla=True)
    plan = plan_reshard(
        vllm(block_tokens=4, tp=4), vllm(block_tokens=4, tp=4, dcp=4), latent, start=0, end=16
    )
    assert senders(plan) == [(rank, rank, 4) for rank in range(4)]
    assert plan.num_bytes == 16 * 4 * 16
    assert plan.waste_bytes == 0


def test_stages_with_other_splits_are_cut_where_they_overlap() -> None:
    source = grid(block_tokens=4, pp=2)
    destination = grid(block_tokens=4, pp=2, stage_layers=(1, 3))
    plan = plan_reshard(source, destination, shape(), start=0, end=4)
    assert [(one.dst_rank, one.src_rank, one.layers) for one in plan.transfers] == [
        (0, 0, range(1)),
        (1, 0, range(1, 2)),
        (1, 1, range(2, 4)),
    ]


def test_an_empty_range_moves_nothing() -> None:
    plan = plan_reshard(ONE_RANK, grid(block_tokens=2, dcp=2), shape(), start=7, end=7)
    assert (plan.transfers, plan.num_bytes, plan.waste_bytes) == ((), 0, 0)


@pytest.mark.parametrize(("start", "end"), [(-1, 4), (4, 3)])
def test_what_is_no_range_is_refused(start: int, end: int) -> None:
    with pytest.raises(BadInputError, match=rf"given: \[{start}, {end}\)"):
        plan_reshard(ONE_RANK, ONE_RANK, shape(), start=start, end=end)


def test_recurrent_states_have_no_tokens_to_move() -> None:
    with pytest.raises(ConfigError, match="a recurrent state is not made of tokens"):
        plan_reshard(ONE_RANK, ONE_RANK, shape(group_kind="mamba"), start=0, end=4)


def test_a_layout_that_cannot_hold_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_shards=3, tp=3, dcp=1; allowed: num_kv_heads=2"):
        plan_reshard(ONE_RANK, grid(block_tokens=4, tp=3), shape(), start=0, end=4)


def test_case_b27_every_rank_keeps_four_of_sixteen_tokens() -> None:
    layout = vllm(block_tokens=4, tp=4, dcp=4)
    assert layout.virtual_block_tokens == 16
    blocks = -(-33 // layout.virtual_block_tokens)
    assert blocks == 3
    held = []
    for rank in range(4):
        shard = layout.place(rank).token_shard
        mapping = slots(
            range(blocks), 0, 33, 4, rank=shard, num_shards=layout.token_shards, interleave=1
        )
        assert len(mapping) == 33
        held.append([int((mapping[first : first + 16] != NOT_HERE).sum()) for first in (0, 16, 32)])
    assert held == [[4, 4, 1], [4, 4, 0], [4, 4, 0], [4, 4, 0]]


@pytest.mark.parametrize("consumer", ["SBNHL", "BSNHL", "BSHNL"])
@pytest.mark.parametrize("producer", ["SBNHL", "BSNHL", "BSHNL"])
def test_case_b30_halves_of_the_heads_arrive_in_every_pair_of_memory_orders(
    producer: str, consumer: str
) -> None:
    four_heads = KvShape(num_layers=1, num_kv_heads=4, head_size=2, dtype="float32")
    source = grid(block_tokens=4, memory=producer, stage_layers=(1,))
    destination = grid(block_tokens=4, tp=2, memory=consumer, stage_layers=(1,))
    check_pair(source, destination, four_heads, 0, 8)
    sender, taker = Memories(source, four_heads, [2, 1]), Memories(destination, four_heads, [1, 3])
    # As in the case: K = 1000 + 100 * head + token, V = 2000 + 100 * head + token.
    side, head, token = np.ogrid[1:3, 0:4, 0:8]
    dense = (1000 * side + 100 * head + token)[None]
    sender.fill(dense, 0, 8)
    for one in plan_reshard(source, destination, four_heads, start=0, end=8).transfers:
        for runs in one.runs:
            where = (one.layers, one.heads)
            taker.arrays[one.dst_rank][
                taker.places(one.dst_rank, *where, destination_tokens(runs))
            ] = sender.arrays[one.src_rank][
                sender.places(one.src_rank, *where, source_tokens(runs))
            ]
    for rank, heads in ((0, range(2)), (1, range(2, 4))):
        found = taker.arrays[rank][taker.places(rank, range(1), heads, np.arange(8))]
        assert found.tolist() == dense[:, :, heads.start : heads.stop].tolist()
