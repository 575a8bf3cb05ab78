from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import (
    BlockHash,
    GroupedHash,
    GroupId,
    join_hashes,
    pack_group,
    split_hashes,
    unpack_group,
)


def test_the_group_follows_the_hash_as_four_big_endian_bytes() -> None:
    assert pack_group(BlockHash(b"\xaa\xbb"), GroupId(258)) == b"\xaa\xbb\x00\x00\x01\x02"


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=16, max_size=32), st.integers(0, 2**32 - 1))
def test_unpacking_gives_back_what_was_packed(block_hash: bytes, group: int) -> None:
    key = pack_group(BlockHash(block_hash), GroupId(group))
    assert unpack_group(key) == (block_hash, group)


def test_a_key_without_hash_is_all_group() -> None:
    assert unpack_group(GroupedHash(b"\x00\x00\x00\x07")) == (b"", 7)


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_that_needs_more_than_four_bytes_is_refused(group: int) -> None:
    with pytest.raises(BadInputError) as caught:
        pack_group(BlockHash(b"\xaa"), GroupId(group))
    assert caught.value.given == group


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([16, 32]), st.integers(0, 5), st.randoms(use_true_random=False))
def test_splitting_gives_back_what_was_joined(size: int, number: int, random: Random) -> None:
    hashes = tuple(BlockHash(random.randbytes(size)) for _ in range(number))
    joined, hash_bytes = join_hashes(hashes)
    assert (len(joined), hash_bytes) == (size * number, size if number else 32)
    assert split_hashes(joined, hash_bytes) == hashes


@pytest.mark.parametrize("sizes", [[16, 32], [20], [0]])
def test_hashes_that_are_not_all_of_one_known_size_are_not_joined(sizes: list[int]) -> None:
    with pytest.raises(BadInputError, match="one size in bytes") as caught:
        join_hashes([BlockHash(bytes(size)) for size in sizes])
    assert (caught.value.given, caught.value.allowed) == (sizes, [16, 32])


@pytest.mark.parametrize(("hash_bytes", "num_bytes"), [(0, 0), (-16, 32), (32, 33), (20, 40)])
def test_bytes_that_are_no_whole_number_of_hashes_are_not_split(
    hash_bytes: int, num_bytes: int
) -> None:
    with pytest.raises(BadInputError, match="cannot be split") as caught:
        split_hashes(bytes(num_bytes), hash_bytes)
    assert caught.value.given == {"hash_bytes": hash_bytes, "hashes_bytes": num_bytes}
