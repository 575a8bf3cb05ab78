"""Instances whose blocks cover different numbers of hashes share their prefixes."""

from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import make_identity
from tests.unit.coordinator.fleet import (
    BLOCK_TOKENS,
    IDENTITY,
    Fleet,
    admit,
    chain,
    failed,
    load_blocks,
    loaded,
    release,
    wrote,
)
from tests.unit.coordinator.positions import first_needed_hash

from kvferry.proto.errors import BadInputError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import InstanceId, LeaseId, RequestId
from kvferry.proto.layout import Layout

ALPHABET = "abcdefghijkl"
WINDOWED = make_identity(
    groups=(
        GroupSpec(kind="full", layers=(0,)),
        GroupSpec(kind="sliding_window", layers=(1,), window_tokens=4),
    )
)


def fleet_of(identity: Identity = IDENTITY, **covers: int) -> Fleet:
    """Instances by name, with the hashes that each one's blocks cover."""
    fleet = Fleet(identity=identity, tells_pool_events=True)
    for name, covered in covers.items():
        fleet.register(name, num_blocks=40, covers=covered)
    return fleet


def keys(fleet: Fleet, lease_id: LeaseId | None) -> list[str]:
    """The leased blocks: the group, and the last letter that the block covers."""
    assert lease_id is not None
    return [f"{group}{chr(key[-1])}" for group, key in fleet.leased_keys(lease_id)]


def num_prefix_hashes(fleet: Fleet) -> list[int]:
    return [lease.num_prefix_hashes for lease in fleet.service.state.leases.live()]


@pytest.mark.parametrize(
    ("source", "destination", "num_hashes", "leased"),
    [
        (1, 2, 6, ["0a", "0b", "0c", "0d", "0e", "0f"]),
        (2, 1, 6, ["0b", "0d", "0f"]),
        (3, 2, 6, ["0c", "0f"]),
        (2, 3, 6, ["0b", "0d", "0f"]),
        (4, 3, 3, ["0d"]),
        (2, 2, 6, ["0b", "0d", "0f"]),
    ],
)
def test_a_load_is_whole_blocks_of_its_taker_and_leases_those_of_its_source_that_hold_them(
    source: int, destination: int, num_hashes: int, leased: list[str]
) -> None:
    fleet = fleet_of(p=source, d=destination)
    fleet.cache("p", "abcdefg")
    load = fleet.admit_load("d", admit("r", "abcdefg"))
    assert keys(fleet, load.lease_id) == leased
    assert num_prefix_hashes(fleet) == [num_hashes]
    assert (load.num_hit_blocks, len(load_blocks(load))) == (0, num_hashes // destination)
    fleet.step("d", load_results=(loaded("r", num_hashes * BLOCK_TOKENS),))
    assert fleet.locate("abcdefg")["d"] == num_hashes
    assert fleet.stats("d").first.remote_hit == num_hashes * BLOCK_TOKENS


def test_a_prefix_that_ends_inside_a_block_leases_the_block_by_a_hash_beyond_it() -> None:
    fleet = fleet_of(p=2, d=1)
    fleet.cache("p", "abcdef")
    # The last token is always computed, so five of the six hashes are of use.
    load = fleet.admit_load("d", admit("r", "abcdef", 0))
    assert keys(fleet, load.lease_id) == ["0b", "0d", "0f"]
    assert (num_prefix_hashes(fleet), len(load_blocks(load))) == ([5], 5)


def test_a_block_whose_last_hash_is_not_known_yet_is_not_found() -> None:
    fleet = fleet_of(p=3, d=1)
    fleet.cache("p", "abcdef")
    load = fleet.admit_load("d", admit("r", "abcde"))
    assert keys(fleet, load.lease_id) == ["0c"]
    assert len(load_blocks(load)) == 3


def test_a_load_begins_inside_a_block_of_its_source_where_the_local_hit_ends() -> None:
    fleet = fleet_of(p=2, d=1)
    fleet.cache("p", "abcdef")
    fleet.cache("d", "abc")
    load = fleet.admit_load("d", admit("r", "abcdef"))
    assert keys(fleet, load.lease_id) == ["0d", "0f"]
    assert (load.num_hit_blocks, len(load_blocks(load))) == (3, 6)


def test_what_a_peer_has_beyond_the_local_hit_must_be_a_whole_block_to_be_loaded() -> None:
    fleet = fleet_of(p=1, d=2)
    fleet.cache("p", "abcde")
    fleet.cache("d", "abcd")
    assert fleet.admit("d", admit("r", "abcdef")).num_hit_blocks == 2


def test_the_peer_with_most_whole_blocks_is_taken_and_of_equal_ones_the_idler() -> None:
    fleet = fleet_of(a=1, b=2, c=3, d=2)
    fleet.cache("a", "abcde")
    fleet.cache("b", "abcd")
    fleet.cache("c", "abc")
    fleet.compute("a", admit("busy", "zz"))
    load = fleet.admit_load("d", admit("r", "abcdef"))
    # Both have two blocks for d, the fifth hash of a is of no use to it.
    assert load.source.instance_id == "b"


def test_a_window_is_leased_from_the_first_block_that_its_taker_needs() -> None:
    fleet = fleet_of(WINDOWED, p=1, d=2)
    fleet.cache("p", "abcdefg")
    load = fleet.admit_load("d", admit("r", "abcdefg"))
    # The next token sees nothing before f, but a block of d begins with e.
    assert keys(fleet, load.lease_id) == ["0a", "0b", "0c", "0d", "0e", "0f", "1e", "1f"]
    full, window = load.block_ids
    assert (len(full), [block != 0 for block in window]) == (3, [False, False, True])


def test_groups_with_windows_are_loaded_up_to_an_end_of_both_sides_blocks() -> None:
    fleet = fleet_of(WINDOWED, p=3, d=2, e=1)
    fleet.cache("p", "abcdefghi")
    assert num_prefix_hashes(fleet) == []
    fleet.admit_load("d", admit("r", "abcdefghi"))
    fleet.admit_load("e", admit("s", "abcdefghi"))
    assert num_prefix_hashes(fleet) == [6, 9]


def test_clients_are_told_and_leased_hashes_of_the_chain() -> None:
    fleet = fleet_of(a=1, b=2, c=3)
    fleet.cache("a", "abc")
    fleet.cache("b", "abcdefg")
    fleet.cache("c", "abcde")
    assert fleet.locate("abcdefgh") == {"b": 6, "a": 3, "c": 3}
    leased = fleet.lease("abcdefgh")
    assert (leased.num_hashes, keys(fleet, leased.lease_id)) == (6, ["0b", "0d", "0f"])
    at_c = fleet.lease("abcdefgh", at="c")
    assert (at_c.num_hashes, keys(fleet, at_c.lease_id)) == (3, ["0c"])


def test_a_handoff_leases_whole_blocks_and_counts_hashes() -> None:
    fleet = fleet_of(p=2, d=1)
    fleet.open_handoff("r", "p", "d")
    fleet.compute("p", admit("r", "abcde", 2))
    fleet.step("p", releases=(release("r", handoff=True),))
    assert num_prefix_hashes(fleet) == [4]
    load = fleet.admit_load("d", admit("r", "abcde", 2))
    assert (keys(fleet, load.lease_id), len(load_blocks(load))) == (["0b", "0d"], 4)


def test_a_part_of_a_load_is_of_use_in_whole_blocks_of_its_taker() -> None:
    fleet = fleet_of(p=1, d=2)
    fleet.cache("p", "abcdef")
    fleet.admit_load("d", admit("r", "abcdef"))
    with pytest.raises(BadInputError, match="given: 12; allowed: 0 to 24, in whole blocks of 8"):
        fleet.step("d", load_results=(loaded("r", 3 * BLOCK_TOKENS, failed(1)),))
    fleet.step("d", load_results=(loaded("r", 4 * BLOCK_TOKENS, failed(2)),))
    assert fleet.locate("abcdef")["d"] == 4


def test_tokens_dealt_over_ranks_make_a_block_of_several_hashes() -> None:
    fleet = fleet_of(p=1)
    fleet.register(
        "d",
        layout=Layout(block_tokens=BLOCK_TOKENS, dcp=2),
        rank_addresses=("127.0.0.1:1", "127.0.0.1:2"),
        rank_pids=(1, 2),
    )
    fleet.cache("p", "abcde")
    load = fleet.admit_load("d", admit("r", "abcde"))
    assert (len(load_blocks(load)), num_prefix_hashes(fleet)) == (2, [4])


def test_every_instance_tells_the_hashes_of_all_hash_blocks() -> None:
    fleet = fleet_of(d=2)
    short = admit("r", "abc", hashes=chain("abcdef")[1::2][:1])
    with pytest.raises(BadInputError, match=r"one hash per full hash block.*allowed: 3 hashes"):
        fleet.step("d", waiting=(short,))
    fleet.compute("d", admit("r", "abc"))
    with pytest.raises(BadInputError, match="hashes=3, num_tokens=16; allowed: 4 hashes"):
        fleet.step("d", progress=(wrote("r", 13, 16),))
    assert fleet.locate("abcd")["d"] == 2


def test_only_blocks_of_one_hash_and_one_rank_can_be_reserved() -> None:
    fleet = fleet_of(d=2)
    fleet.register(
        "dealt",
        layout=Layout(block_tokens=BLOCK_TOKENS // 2, dcp=2),
        rank_addresses=("127.0.0.1:1", "127.0.0.1:2"),
        rank_pids=(1, 2),
    )
    with pytest.raises(BadInputError, match=r"d takes no single hash blocks.*hashes_per_block=2"):
        fleet.reserve("d", "ab")
    with pytest.raises(BadInputError, match=r"dealt takes no single hash blocks.*num_ranks=2"):
        fleet.reserve("dealt", "ab")


@settings(deadline=None, max_examples=150)
@given(
    identity=st.sampled_from([IDENTITY, WINDOWED]),
    source=st.integers(1, 4),
    destination=st.integers(1, 4),
    num_cached=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    num_asked=st.integers(1, 12),
    extra=st.integers(0, 3),
)
def test_what_is_loaded_and_leased_follows_from_the_positions(
    *,
    identity: Identity,
    source: int,
    destination: int,
    num_cached: tuple[int, int],
    num_asked: int,
    extra: int,
) -> None:
    fleet = fleet_of(identity, p=source, d=destination)
    for name, length in zip(("p", "d"), num_cached, strict=True):
        fleet.cache(name, ALPHABET[:length])
    ask = admit("r", ALPHABET[:num_asked], extra)
    limit = (ask.num_tokens - 1) // BLOCK_TOKENS
    local = min(num_cached[1], limit) // destination * destination
    step = destination if identity is IDENTITY else lcm(source, destination)
    at_source = min(num_cached[0], num_asked) // source * source
    end = min(at_source, limit) // step * step
    reply = fleet.step("d", waiting=(ask,))
    if end <= local:
        assert reply.loads == ()
        assert reply.scheduled[0].num_computed_tokens == local * BLOCK_TOKENS
        return
    (load,) = reply.loads
    assert {len(table) for table in load.block_ids} == {end // destination}
    assert load.num_hit_blocks == local // destination
    assert num_prefix_hashes(fleet) == [end]
    expected = []
    for group_id, group in enumerate(identity.groups):
        first = max(first_needed_hash(group, end, destination, BLOCK_TOKENS), local)
        ends = {position // source * source + source - 1 for position in range(first, end)}
        expected += [f"{group_id}{ALPHABET[last]}" for last in sorted(ends)]
    assert keys(fleet, load.lease_id) == expected
    # What has come can be found, by the pool itself and by others.
    fleet.step("d", load_results=(loaded("r", end * BLOCK_TOKENS),))
    assert fleet.locate(ALPHABET[:num_asked])["d"] == end
    instance = fleet.service.state.instance(InstanceId("d"))
    assert instance.requests[RequestId("r")].num_computed_tokens == end * BLOCK_TOKENS
