"""Blocks of different sizes on one hash chain."""

import pytest

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.shared_chain import block_keys, blocks_of_range, hashes_per_block


def test_a_block_is_found_by_the_last_hash_it_covers() -> None:
    chain = hash_tokens(make_scheme(hash_block_tokens=4), list(range(34)))
    assert len(chain) == 8
    assert block_keys(chain, hashes_per_block(4, 4)) == chain
    assert block_keys(chain, hashes_per_block(12, 4)) == (chain[2], chain[5])
    assert block_keys(chain, hashes_per_block(64, 4)) == ()


@pytest.mark.parametrize("size", [2, 6])
def test_a_block_that_is_no_multiple_of_a_hash_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"virtual_block_tokens={size}; allowed: multiples of"):
        hashes_per_block(size, 4)


def test_a_range_is_in_every_block_that_it_touches() -> None:
    assert blocks_of_range(0, 32, 16) == range(2)
    assert blocks_of_range(15, 17, 16) == range(2)
    assert blocks_of_range(16, 17, 16) == range(1, 2)


def test_no_positions_are_in_no_blocks_and_a_bad_range_is_refused() -> None:
    assert list(blocks_of_range(5, 5, 4)) == []
    with pytest.raises(BadInputError, match=r"no range of positions; given: \[3, 2\)"):
        blocks_of_range(3, 2, 4)
