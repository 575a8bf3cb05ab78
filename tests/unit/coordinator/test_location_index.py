"""Who holds which prefix, in one pass."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.location_index import LocationIndex
from kvferry.coordinator.pool_events import Cleared, Removed, Stored
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, InstanceId

D1, D2 = b"d1", b"d2"
G0, G1 = GroupId(0), GroupId(1)
A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
H = [BlockHash(bytes([i])) for i in range(6)]


def stored(*numbers: int, group: GroupId = G0) -> Stored:
    return Stored(tuple(BlockId(n + 1) for n in numbers), tuple(H[n] for n in numbers), group)


def removed(*numbers: int, group: GroupId = G0) -> Removed:
    return Removed(tuple(BlockId(n + 1) for n in numbers), tuple(H[n] for n in numbers), group)


def index_of(**holdings: tuple[int, ...]) -> LocationIndex:
    index = LocationIndex()
    for name, numbers in holdings.items():
        index.join(InstanceId(name), D1)
        index.apply(InstanceId(name), [stored(*numbers)])
    return index


def test_every_instance_gets_its_own_longest_prefix() -> None:
    index = index_of(a=(0, 1, 2), b=(0,), c=(1, 2))
    assert index.longest_prefixes(D1, H[:4], G0) == {A: 3, B: 1}


def test_instances_are_given_longest_prefix_first() -> None:
    prefixes = index_of(a=(0,), b=(0, 1, 2), c=(0, 1)).longest_prefixes(D1, H[:4], G0)
    assert list(prefixes.longest_first()) == [(B, 3), (C, 2), (A, 1)]
    assert (len(prefixes), list(prefixes), prefixes.get(InstanceId("d"))) == (3, [B, C, A], None)


def test_a_gap_ends_a_prefix() -> None:
    assert index_of(a=(0, 2, 3)).longest_prefixes(D1, H[:4], G0) == {A: 1}


def test_no_hashes_and_unknown_identities_find_nobody() -> None:
    index = index_of(a=(0,))
    assert index.longest_prefixes(D1, [], G0) == {}
    assert index.longest_prefixes(D2, H[:1], G0) == {}


def test_identities_never_share_a_block() -> None:
    index = index_of(a=(0, 1))
    index.join(B, D2)
    index.apply(B, [stored(0)])
    assert index.longest_prefixes(D1, H[:2], G0) == {A: 2}
    assert index.longest_prefixes(D2, H[:2], G0) == {B: 1}


def test_groups_never_share_a_block() -> None:
    index = index_of(a=(0, 1))
    index.apply(A, [stored(0, group=G1), removed(0, 1)])
    assert index.longest_prefixes(D1, H[:2], G0) == {}
    assert index.longest_prefixes(D1, H[:2], G1) == {A: 1}
    assert index.num_keys() == 1


def test_a_hash_is_gone_with_its_last_copy_only() -> None:
    index = index_of(a=(0, 0, 0))
    for _ in range(2):
        index.apply(A, [removed(0)])
        assert index.longest_prefixes(D1, H[:1], G0) == {A: 1}
    index.apply(A, [removed(0)])
    assert (dict(index.longest_prefixes(D1, H[:1], G0)), index.num_keys()) == ({}, 0)


def test_clearing_one_instance_leaves_the_others() -> None:
    index = index_of(a=(0, 0, 1), b=(0,))
    index.apply(A, [Cleared()])
    assert index.longest_prefixes(D1, H[:2], G0) == {B: 1}
    index.apply(A, [stored(0), removed(0)])
    assert index.copies_of(A) == {}


def test_an_instance_that_left_is_forgotten_and_its_number_reused() -> None:
    index = index_of(a=(0, 0), b=(0,))
    index.leave(A)
    index.leave(A)
    index.join(C, D1)
    assert index.longest_prefixes(D1, H[:1], G0) == {B: 1}
    assert index.members() == {B, C}
    assert index.copies_of(C) == {}
    index.leave(B)
    index.leave(C)
    assert index.num_keys() == 0


def test_what_an_instance_held_that_left_is_found_no_more_and_purged_little_by_little() -> None:
    index = index_of(a=(0, 1, 2, 3), b=(0, 1))
    index.leave(A)
    assert index.longest_prefixes(D1, H[:4], G0) == {B: 2}
    index.join(C, D1)
    index.apply(C, [stored(0, 1, 2)])
    index.apply(B, [removed(1)])
    assert index.longest_prefixes(D1, H[:4], G0) == {B: 1, C: 3}
    index.purge(2)
    assert index.num_keys() == 4
    index.join(A, D1)
    assert index.copies_of(A) == {}
    index.purge(2)
    assert index.num_keys() == 3
    assert index.longest_prefixes(D1, H[:4], G0) == {B: 1, C: 3}


changes = st.tuples(
    st.sampled_from(["join", "leave", "store", "remove", "purge"]),
    st.sampled_from([A, B, C]),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(changes, max_size=40))
def test_purges_change_nothing_that_is_found(made: list[tuple[str, InstanceId, int]]) -> None:
    index = LocationIndex()
    held: dict[InstanceId, set[int]] = {}
    for what, name, number in made:
        if what == "purge":
            index.purge(number)
        elif what == "leave":
            index.leave(name)
            held.pop(name, None)
        elif what == "join" and name not in held:
            index.join(name, D1)
            held[name] = set()
        elif what == "store" and name in held and number not in held[name]:
            index.apply(name, [stored(number)])
            held[name].add(number)
        elif what == "remove" and number in held.get(name, ()):
            index.apply(name, [removed(number)])
            held[name].remove(number)
        lengths = {
            one: next(n for n in range(5) if n not in numbers) for one, numbers in held.items()
        }
        expected = {one: length for one, length in lengths.items() if length}
        assert index.longest_prefixes(D1, H[:4], G0) == expected
    index.purge(1000)
    assert index.num_keys() == len(set().union(*held.values()))


def test_contradicting_news_is_refused() -> None:
    index = index_of(a=(0,))
    with pytest.raises(InvariantError, match="already"):
        index.join(A, D1)
    with pytest.raises(InvariantError, match="does not hold"):
        index.apply(A, [removed(1)])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=20))
def test_prefixes_are_those_of_the_sets_held(holdings: list[set[int]]) -> None:
    index = index_of(**{f"i{n}": tuple(sorted(held)) for n, held in enumerate(holdings)})
    expected = {}
    for n, held in enumerate(holdings):
        length = next((i for i in range(6) if i not in held), 6)
        if length:
            expected[InstanceId(f"i{n}")] = length
    assert index.longest_prefixes(D1, H, G0) == expected


def length_of(held: set[int]) -> int:
    return next((i for i in range(6) if i not in held), 6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 39), st.booleans(), st.lists(st.integers(0, 5), unique=True)),
        max_size=40,
    )
)
def test_prefixes_follow_what_instances_store_and_remove(
    changes: list[tuple[int, bool, list[int]]],
) -> None:
    names = [f"i{n}" for n in range(40)]
    index = index_of(**dict.fromkeys(names, (0, 1, 2)))
    held = {name: {0, 1, 2} for name in names}
    for n, store, numbers in changes:
        ours = held[names[n]]
        if store:
            new = [number for number in numbers if number not in ours]
            index.apply(InstanceId(names[n]), [stored(*new)])
            ours |= set(new)
        else:
            old = [number for number in numbers if number in ours]
            index.apply(InstanceId(names[n]), [removed(*old)])
            ours -= set(old)
    expected = {name: length_of(ours) for name, ours in held.items() if length_of(ours)}
    assert index.longest_prefixes(D1, H, G0) == expected


def test_nobody_holds_what_no_member_has_and_nobody_is_like_who_is_no_member() -> None:
    index = index_of(a=())
    assert list(index.holders(A, H[0], [G1])) == []
    assert list(index.holders(B, H[0], [G0])) == []
