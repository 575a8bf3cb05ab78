import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.proto.errors import BadInputError
from kvferry.worker.slot_mapping import NOT_HERE, slots

GOLDEN = Path(os.environ.get("KVFERRY_GOLDEN") or Path(__file__).parents[2] / "golden" / "data")


def golden(kind: str) -> list[dict[str, Any]]:
    lines = (GOLDEN / "slots_017.jsonl").read_text().splitlines()
    return [vector for vector in map(json.loads, lines) if vector["type"] == kind]


def test_slots_are_those_of_real_vllm_on_the_owner_and_absent_elsewhere() -> None:
    vectors = golden("slots")
    assert vectors
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


def test_each_rank_owns_as_many_tokens_as_in_real_vllm() -> None:
    vectors = golden("local_lengths")
    assert vectors
    for vector in vectors:
        for length, local in zip(vector["lengths"], vector["expect"]["local"], strict=True):
            expected = local if isinstance(local, list) else [local]
            counts = [
                num_owned(length, rank, vector["dcp"], vector["interleave"])
                for rank in range(vector["dcp"])
            ]
            assert counts == expected, vector


def num_owned(length: int, rank: int, num_shards: int, interleave: int) -> int:
    """Return how many of the first `length` tokens the rank holds, in blocks of one interleave."""
    table = range(1, length + 2)
    mapping = slots(
        table, 0, length, interleave, rank=rank, num_shards=num_shards, interleave=interleave
    )
    return int((mapping != NOT_HERE).sum())


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
