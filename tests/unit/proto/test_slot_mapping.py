import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.golden.folder import IS_OWN, lines_of

from kvferry.proto.errors import BadInputError
from kvferry.proto.slot_mapping import NOT_HERE, local_lengths, slots


def golden(kind: str) -> list[dict[str, Any]]:
    lines = lines_of("slots_017.jsonl")
    return [vector for vector in map(json.loads, lines) if vector["type"] == kind]


def test_slots_are_those_of_real_vllm_on_the_owner_and_absent_elsewhere() -> None:
    vectors = golden("slots")
    assert vectors or not IS_OWN
    for vector in vectors:
        num_shards = vector["dcp"] * vector["pcp"]
        end = max(vector["positions"]) + 1
        by_rank = [
            slots(
                vector["table"],
                0,
                end,
                vector["block_tokens"],
                rank=rank,
                num_shards=num_shards,
                interleave=vector["interleave"],
            )
            for rank in range(num_shards)
        ]
        expect = vector["expect"]
        for position, owner, slot in zip(
            vector["positions"], expect["owner"], expect["slot"], strict=True
        ):
            wanted = [slot if rank == owner else NOT_HERE for rank in range(num_shards)]
            assert [mapping[position] for mapping in by_rank] == wanted, vector


def test_each_rank_holds_as_many_tokens_as_in_real_vllm() -> None:
    vectors = golden("local_lengths")
    assert vectors or not IS_OWN
    for vector in vectors:
        local = local_lengths(
            vector["lengths"], num_shards=vector["dcp"], interleave=vector["interleave"]
        )
        # A single rank's lengths were recorded flat.
        expected = np.asarray(vector["expect"]["local"]).reshape(local.shape)
        assert local.tolist() == expected.tolist(), vector


def test_every_recorded_line_is_slots_or_local_lengths() -> None:
    num_lines = len(lines_of("slots_017.jsonl"))
    assert len(golden("slots")) + len(golden("local_lengths")) == num_lines


@given(
    length=st.integers(0, 200),
    num_shards=st.integers(1, 8),
    interleave=st.integers(1, 4),
    rounds=st.integers(1, 3),
)
def test_a_rank_holds_as_many_tokens_as_it_has_slots_for(
    length: int, num_shards: int, interleave: int, rounds: int
) -> None:
    block_tokens = interleave * rounds
    table = range(1, length + 2)
    by_rank = [
        slots(
            table, 0, length, block_tokens, rank=rank, num_shards=num_shards, interleave=interleave
        )
        for rank in range(num_shards)
    ]
    held = local_lengths([length], num_shards=num_shards, interleave=interleave)
    assert held.tolist() == [[int((mapping != NOT_HERE).sum()) for mapping in by_rank]]


def test_no_lengths_give_no_rows() -> None:
    assert local_lengths([], num_shards=2).shape == (0, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_shards": 0}, "num_shards must be positive; given: 0"),
        ({"interleave": 0}, "interleave must be positive; given: 0"),
    ],
)
def test_shards_and_interleave_below_one_are_refused(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        local_lengths([1], **settings)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(BadInputError, match="a negative length; given: -1; allowed: >= 0"):
        local_lengths([3, -1])


def test_one_rank_maps_positions_in_the_middle_of_the_table() -> None:
    assert slots([5, 9, 2], 3, 9, 4).tolist() == [23, 36, 37, 38, 39, 8]


def test_no_positions_give_no_slots_even_without_blocks() -> None:
    assert slots([], 0, 0, 4).tolist() == []


@pytest.mark.parametrize("positions", [(0, 9), (-1, 2), (5, 4)])
def test_positions_outside_the_table_are_refused_with_the_range(positions: tuple[int, int]) -> None:
    with pytest.raises(BadInputError, match=r"allowed: within \[0, 8\)"):
        slots([5, 6], *positions, 4)


def test_a_rank_that_is_no_shard_is_refused() -> None:
    with pytest.raises(BadInputError, match="no such shard; given: 2; allowed: 0 to 1"):
        slots([5], 0, 1, 4, rank=2, num_shards=2)


@pytest.mark.parametrize("interleave", [0, 3])
def test_an_interleave_that_does_not_divide_the_block_is_refused(interleave: int) -> None:
    with pytest.raises(BadInputError, match=f"given: {interleave}; allowed: 4"):
        slots([5], 0, 1, 4, interleave=interleave)
