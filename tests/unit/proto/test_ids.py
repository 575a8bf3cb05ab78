import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockHash, GroupedHash, GroupId, pack_group, unpack_group


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
