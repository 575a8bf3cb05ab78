"""The location index where instances of one identity have blocks of different sizes."""

from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import make_identity
from tests.unit.coordinator.positions import first_needed_hash

from kvferry.coordinator.location_index import LocationIndex
from kvferry.coordinator.pool_events import Cleared, Stored
from kvferry.coordinator.prefix_rules import rules_of
from kvferry.proto.identity import GroupSpec
from kvferry.proto.ids import BlockHash, BlockId, GroupId, InstanceId

HASH_TOKENS = 4
NUM_HASHES = 12
DIGEST = b"d"
A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
CHAIN = [BlockHash(bytes([i])) for i in range(NUM_HASHES)]
FULL = GroupSpec(kind="full", layers=(0,))


def stored(covered: int, blocks: set[int], group: int = 0) -> Stored:
    """Blocks by their numbers in the sequence, each under the last hash that it covers."""
    numbers = sorted(blocks)
    return Stored(
        tuple(BlockId(n + 1) for n in numbers),
        tuple(CHAIN[(n + 1) * covered - 1] for n in numbers),
        GroupId(group),
    )


def index_of(**holdings: tuple[int, set[int]]) -> LocationIndex:
    """An index over instances of one group: hashes per block, and the blocks they hold."""
    index = LocationIndex()
    for name, (covered, blocks) in holdings.items():
        index.join(InstanceId(name), DIGEST, covered)
        index.apply(InstanceId(name), [stored(covered, blocks)])
    return index


def usable(
    index: LocationIndex,
    unit: int,
    num_hashes: int = NUM_HASHES,
    limit: int | None = None,
    groups: tuple[GroupSpec, ...] = (FULL,),
) -> dict[InstanceId, int]:
    identity = make_identity(groups=groups)
    rules = rules_of(identity, HASH_TOKENS, unit)
    return dict(index.longest_usable(DIGEST, CHAIN[:num_hashes], rules, limit))


def test_lengths_are_hashes_whatever_a_block_covers() -> None:
    index = index_of(a=(1, {0, 1, 2}), b=(2, {0, 1}), c=(3, {0}))
    assert usable(index, unit=1) == {A: 3, B: 4, C: 3}
    assert index.longest_prefixes(DIGEST, CHAIN, GroupId(0)) == {A: 3, B: 4, C: 3}


def test_instances_of_all_classes_are_given_longest_prefix_first() -> None:
    index = index_of(a=(1, {0}), b=(2, {0, 1}), c=(3, {0}))
    prefixes = index.longest_prefixes(DIGEST, CHAIN, GroupId(0))
    assert list(prefixes.longest_first()) == [(B, 4), (C, 3), (A, 1)]


def test_whoever_asks_gets_whole_blocks_of_its_own() -> None:
    index = index_of(a=(1, {0, 1, 2, 3, 4}), b=(3, {0}))
    assert usable(index, unit=2) == {A: 4, B: 2}
    assert usable(index, unit=4) == {A: 4}


def test_a_prefix_may_end_inside_a_block_whose_hash_comes_after_the_end() -> None:
    index = index_of(a=(3, {0, 1}))
    assert usable(index, unit=1, limit=5) == {A: 5}
    assert usable(index, unit=2, limit=5) == {A: 4}
    # The second block ends with a hash that is not known yet, so nobody can ask for it.
    assert usable(index, unit=1, num_hashes=5) == {A: 3}


def test_groups_with_windows_end_only_where_both_sides_have_a_block_end() -> None:
    window = GroupSpec(kind="sliding_window", layers=(0,), window_tokens=5)
    index = index_of(a=(2, {1}), b=(3, {1}))
    assert usable(index, unit=1, groups=(window,)) == {A: 4, B: 6}
    assert usable(index, unit=2, groups=(window,)) == {A: 4, B: 6}
    assert usable(index, unit=3, groups=(window,)) == {B: 6}
    assert usable(index, unit=4, groups=(window,)) == {}


def test_a_coarse_asker_needs_more_of_a_window_than_a_fine_holder_keeps() -> None:
    # The next token sees the 5 tokens before it: two blocks of a hash, or one of four hashes.
    window = GroupSpec(kind="sliding_window", layers=(0,), window_tokens=6)
    index = index_of(a=(1, {2, 3}), b=(1, {0, 1, 2, 3}))
    assert usable(index, unit=1, groups=(window,)) == {A: 4, B: 4}
    assert usable(index, unit=4, groups=(window,)) == {B: 4}


def test_a_class_is_forgotten_with_its_last_member_only() -> None:
    index = index_of(a=(2, {0}), b=(2, {0}), c=(1, {0}))
    index.leave(A)
    assert usable(index, unit=1) == {B: 2, C: 1}
    index.apply(B, [Cleared()])
    assert usable(index, unit=1) == {C: 1}
    index.leave(B)
    index.join(A, DIGEST, 3)
    assert usable(index, unit=1) == {C: 1}
    index.leave(C)
    index.leave(A)
    assert (index.num_keys(), index.members()) == (0, set())


def naive_length(
    groups: tuple[GroupSpec, ...], held: list[set[int]], covered: int, unit: int, limit: int
) -> int:
    step = unit if groups == (FULL,) else lcm(covered, unit)
    for end in range(limit // step * step, 0, -step):
        if all(
            {
                position // covered
                for position in range(first_needed_hash(group, end, unit, HASH_TOKENS), end)
            }
            <= blocks
            for group, blocks in zip(groups, held, strict=True)
        ):
            return end
    return 0


WINDOW_OR_STATE = st.one_of(
    st.builds(
        GroupSpec,
        kind=st.just("sliding_window"),
        layers=st.just((0,)),
        window_tokens=st.integers(1, 40),
    ),
    st.builds(
        GroupSpec,
        kind=st.just("chunked_local"),
        layers=st.just((0,)),
        chunk_tokens=st.sampled_from([6 * HASH_TOKENS, 12 * HASH_TOKENS]),
    ),
    st.builds(GroupSpec, kind=st.just("mamba"), layers=st.just((0,)), state_bytes=st.just(8)),
)


@st.composite
def some_groups(draw: st.DrawFn) -> tuple[GroupSpec, ...]:
    kinds = draw(st.lists(st.one_of(st.just(FULL), WINDOW_OR_STATE), min_size=1, max_size=3))
    return tuple(
        GroupSpec(
            kind=group.kind,
            layers=(layer,),
            window_tokens=group.window_tokens,
            chunk_tokens=group.chunk_tokens,
            state_bytes=group.state_bytes,
        )
        for layer, group in enumerate(kinds)
    )


@settings(deadline=None, max_examples=300)
@given(st.data(), some_groups(), st.sampled_from([1, 2, 3, 6]), st.integers(0, NUM_HASHES))
def test_usable_lengths_are_those_of_the_positions_that_are_held(
    data: st.DataObject, groups: tuple[GroupSpec, ...], unit: int, limit: int
) -> None:
    index = LocationIndex()
    expected = {}
    for number in range(data.draw(st.integers(1, 4))):
        name = InstanceId(f"i{number}")
        covered = data.draw(st.sampled_from([1, 2, 3]))
        blocks = range(NUM_HASHES // covered)
        index.join(name, DIGEST, covered)
        held = []
        for group_id in range(len(groups)):
            missing = data.draw(st.sets(st.sampled_from(blocks), max_size=3))
            held.append(set(blocks) - missing)
            index.apply(name, [stored(covered, held[-1], group_id)])
        length = naive_length(groups, held, covered, unit, limit)
        if length:
            expected[name] = length
    assert usable(index, unit, limit=limit, groups=groups) == expected
