"""Runs of hashes against one hash after the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.hash_index import HashIndex
from kvferry.proto.ids import BlockHash, BlockId, GroupId

H = [BlockHash(bytes([i])) for i in range(5)]


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_the_oldest_block_of_a_hash_is_found_until_it_is_dropped() -> None:
    index = HashIndex(GroupId(0))
    index.insert([H[0], H[1], H[0]], ids(1, 2, 3))
    index.insert([H[0]], ids(4))
    assert dict(index.items()) == {H[0]: (1, 3, 4), H[1]: (2,)}
    index.drop([H[0], H[1]], ids(1, 2))
    assert (index.find(H[0]), index.find(H[1]), len(index)) == (3, None, 1)
    index.drop([H[0]], ids(4))
    assert dict(index.items()) == {H[0]: (3,)}


def test_a_prefix_ends_at_the_first_hash_that_nobody_holds() -> None:
    index = HashIndex(GroupId(0))
    index.insert([H[0], H[1], H[3]], ids(5, 0, 7))
    assert index.find_prefix(H) == [5, 0]
    assert index.find_prefix([]) == []


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 19), unique=True)), max_size=20))
def test_a_run_does_what_its_members_do_one_by_one(changes: list[tuple[bool, list[int]]]) -> None:
    whole, single = HashIndex(GroupId(0)), HashIndex(GroupId(0))
    model: dict[BlockHash, list[BlockId]] = {}
    held: set[int] = set()
    for insert, numbers in changes:
        chosen = [number for number in numbers if (number in held) is not insert]
        hashes, blocks = [H[number % 5] for number in chosen], ids(*chosen)
        (whole.insert if insert else whole.drop)(hashes, blocks)
        for block_hash, block in zip(hashes, blocks, strict=True):
            (single.insert if insert else single.drop)([block_hash], [block])
            if insert:
                model.setdefault(block_hash, []).append(block)
            else:
                model[block_hash].remove(block)
        held ^= set(chosen)
        expected = {block_hash: tuple(found) for block_hash, found in model.items() if found}
        assert dict(whole.items()) == dict(single.items()) == expected
