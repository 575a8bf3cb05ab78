"""Which hashes stand for the blocks of a load, here and at a source of other blocks."""

import pytest

from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import BlockHash, BlockId, GroupId
from kvferry.worker.group_load import GroupLoad, group_load

CHAIN = [BlockHash(bytes([number]) * 32) for number in range(12)]
"""Hash i ends with token 4 * i + 3."""

BLOCKS = [BlockId(7), BlockId(3)]


def load_of(
    first_block: int, block_tokens: int, source_block_tokens: int, *, num_hashes: int = 12
) -> GroupLoad:
    return group_load(
        CHAIN[:num_hashes],
        GroupId(1),
        BLOCKS,
        first_block=first_block,
        block_tokens=block_tokens,
        source_block_tokens=source_block_tokens,
        hash_block_tokens=4,
    )


@pytest.mark.parametrize(
    ("first_block", "block_tokens", "source_tokens", "hashes", "first_source", "source_hashes"),
    [
        (0, 4, 4, [0, 1], 0, [0, 1]),
        (3, 4, 4, [3, 4], 3, [3, 4]),
        # Several of theirs in one of ours, and the reverse.
        (1, 8, 4, [3, 5], 2, [2, 3, 4, 5]),
        (1, 4, 8, [1, 2], 0, [1, 3]),
        (2, 4, 8, [2, 3], 1, [3]),
        # Neither divides the other: tokens 8 to 23 are in blocks 0 and 1 of 12 tokens.
        (1, 8, 12, [3, 5], 0, [2, 5]),
        (1, 12, 8, [5, 8], 1, [3, 5, 7, 9]),
    ],
)
def test_each_side_finds_the_same_tokens_by_the_last_hashes_of_its_own_blocks(
    *,
    first_block: int,
    block_tokens: int,
    source_tokens: int,
    hashes: list[int],
    first_source: int,
    source_hashes: list[int],
) -> None:
    assert load_of(first_block, block_tokens, source_tokens) == GroupLoad(
        group_id=GroupId(1),
        first_block=first_block,
        block_ids=BLOCKS,
        hashes=tuple(CHAIN[index] for index in hashes),
        first_source_block=first_source,
        source_hashes=tuple(CHAIN[index] for index in source_hashes),
    )


def test_hashes_beyond_the_sources_last_block_do_not_matter() -> None:
    # Blocks 1 and 2 of 12 tokens end with token 35, which is in block 4 of 8: hash 9.
    assert load_of(1, 12, 8, num_hashes=10) == load_of(1, 12, 8)


@pytest.mark.parametrize(("block_tokens", "source_tokens"), [(6, 4), (4, 6)])
def test_blocks_of_either_side_that_are_no_multiple_of_a_hash_are_refused(
    block_tokens: int, source_tokens: int
) -> None:
    with pytest.raises(ConfigError, match="a virtual block must be a multiple of a hash block"):
        load_of(0, block_tokens, source_tokens)
