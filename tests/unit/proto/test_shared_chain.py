import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.shared_chain import (
    BlockPart,
    block_keys,
    blocks_of_range,
    hashes_per_block,
    source_parts,
    usable_tokens,
)


def part(block: int, start: int, end: int) -> BlockPart:
    return BlockPart(block=block, start=start, end=end)


def test_a_block_is_found_by_the_last_hash_it_covers() -> None:
    chain = hash_tokens(make_scheme(hash_block_tokens=4), list(range(34)))
    assert len(chain) == 8
    assert block_keys(chain, virtual_block_tokens=4, hash_block_tokens=4) == chain
    assert block_keys(chain, virtual_block_tokens=12, hash_block_tokens=4) == (chain[2], chain[5])
    assert block_keys(chain, virtual_block_tokens=64, hash_block_tokens=4) == ()


@pytest.mark.parametrize("size", [2, 6])
def test_a_block_that_is_no_multiple_of_a_hash_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"virtual_block_tokens={size}; allowed: multiples of"):
        hashes_per_block(size, 4)


def test_a_destination_block_may_need_parts_of_two_source_blocks() -> None:
    parts = source_parts(0, 48, source_block_tokens=16, destination_block_tokens=24)
    assert parts == {0: (part(0, 0, 16), part(1, 16, 24)), 1: (part(1, 24, 32), part(2, 32, 48))}


def test_a_source_block_may_be_needed_by_several_destination_blocks() -> None:
    parts = source_parts(0, 32, source_block_tokens=32, destination_block_tokens=16)
    assert parts == {0: (part(0, 0, 16),), 1: (part(0, 16, 32),)}


def test_a_range_cuts_the_first_and_the_last_part() -> None:
    parts = source_parts(5, 21, source_block_tokens=16, destination_block_tokens=8)
    assert parts == {0: (part(0, 5, 8),), 1: (part(0, 8, 16),), 2: (part(1, 16, 21),)}


def test_only_whole_destination_blocks_of_a_held_prefix_are_usable() -> None:
    assert usable_tokens(3, source_block_tokens=16, destination_block_tokens=32) == 32
    assert usable_tokens(1, source_block_tokens=16, destination_block_tokens=32) == 0
    assert usable_tokens(3, source_block_tokens=32, destination_block_tokens=16) == 96


def test_no_positions_are_in_no_blocks_and_a_bad_range_is_refused() -> None:
    assert list(blocks_of_range(5, 5, 4)) == []
    with pytest.raises(BadInputError, match=r"no range of positions; given: \[3, 2\)"):
        blocks_of_range(3, 2, 4)


@given(
    start=st.integers(0, 100),
    length=st.integers(0, 100),
    source=st.integers(1, 20),
    destination=st.integers(1, 20),
)
def test_parts_cover_the_range_once_and_lie_in_their_blocks(
    start: int, length: int, source: int, destination: int
) -> None:
    end = start + length
    parts = source_parts(
        start, end, source_block_tokens=source, destination_block_tokens=destination
    )
    covered = []
    for block, pieces in parts.items():
        for piece in pieces:
            for position in range(piece.start, piece.end):
                assert (position // destination, position // source) == (block, piece.block)
                covered.append(position)
    assert covered == list(range(start, end))
