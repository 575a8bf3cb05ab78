"""A drained instance does nothing new, and what only it holds comes to peers before it goes."""

import pytest
from tests.unit.coordinator.drains import (
    BLOCK_BYTES,
    drain,
    end,
    fleet_of,
    move_all,
    moves_of,
    state_of,
    tick,
)
from tests.unit.coordinator.fleet import (
    BLOCK_TOKENS,
    admit,
    chain,
    info,
    release,
    runs,
    wrote,
)
from tests.unit.coordinator.returning import come_back

from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    DrainedError,
    NotFoundError,
    RestoringError,
    StaleError,
)
from kvferry.proto.ids import Incarnation
from kvferry.proto.messages import Locate, Located


def test_what_only_the_drained_instance_holds_comes_to_a_peer_and_the_instance_goes() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "abcd")
    begun = drain(fleet, "a")
    assert (begun.is_over, begun.num_cached_blocks, begun.moved) == (False, 4, ())
    assert state_of(fleet, "a") == "draining"
    (move,) = moves_of(fleet, "b")
    assert move.hashes == chain("abcd")
    assert move.source.instance_id == "a"
    assert drain(fleet, "a").num_waiting == 4
    assert fleet.locate("abcd") == {"a": 4, "b": 0}
    end(fleet, "b", move)
    assert fleet.locate("abcd") == {"a": 4, "b": 4}
    tick(fleet)
    assert fleet.locate("abcd") == {"b": 4}
    over = drain(fleet, "a")
    assert (over.is_over, over.seconds, over.num_dropped) == (True, 0.5, 0)
    assert [(m.instance_id, m.num_blocks, m.num_bytes) for m in over.moved] == [
        ("b", 4, 4 * BLOCK_BYTES)
    ]
    counters = fleet.describe().counters
    assert (counters["drains"], counters["drained_blocks"]) == (1, 4)
    assert counters["drained_bytes"] == 4 * BLOCK_BYTES
    assert [e.detail for e in fleet.effects if e.kind == "instance_drained"] == [
        f"a: moved 4 blocks ({4 * BLOCK_BYTES} bytes) and dropped 0 in 0.5 s"
    ]
    assert fleet.num_free("b") == 19


def test_a_lost_move_delays_the_end_until_its_lease_is_over() -> None:
    fleet = fleet_of("a", "b", suspect_after_s=1e6, dead_after_s=1e6)
    fleet.cache("a", "ab")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    tick(fleet)
    assert state_of(fleet, "a") == "draining"
    tick(fleet, move.ttl_s)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped, over.moved) == (True, 2, ())


def test_requests_go_on_until_they_end_and_only_then_the_instance_goes() -> None:
    fleet = fleet_of("a", "b")
    fleet.compute("a", admit("r", "ab"))
    drain(fleet, "a")
    move_all(fleet, "b")
    tick(fleet)
    assert drain(fleet, "a").num_requests == 1
    assert len(fleet.step("a", running=(runs("r", 3 * BLOCK_TOKENS),)).scheduled) == 1
    fleet.step("a", releases=(release("r"),))
    tick(fleet)
    assert drain(fleet, "a").is_over


def test_at_the_deadline_it_goes_whatever_runs_and_whoever_has_a_lease() -> None:
    fleet = fleet_of("a", "b")
    fleet.compute("a", admit("r", "ab"))
    fleet.lease("ab", ttl_s=100.0)
    drain(fleet, "a", deadline_s=2.0)
    tick(fleet, 1.0)
    assert not drain(fleet, "a", deadline_s=30.0).is_over  # a later one does not count
    tick(fleet, 1.0)
    over = drain(fleet, "a")
    assert (over.is_over, over.seconds, over.num_dropped, over.num_requests) == (True, 2.0, 2, 1)
    assert fleet.describe().num_leases == 0


def test_a_lease_of_a_client_keeps_it_until_it_is_given_back() -> None:
    fleet = fleet_of("a")
    fleet.cache("a", "ab")
    fleet.lease("ab", ttl_s=3.0)
    drain(fleet, "a")
    tick(fleet, 1.0)
    assert not drain(fleet, "a").is_over
    tick(fleet, 1.0)
    fleet.step("a")
    tick(fleet, 1.0)
    assert drain(fleet, "a").is_over


def test_nothing_new_is_asked_of_it() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    drain(fleet, "a")
    with pytest.raises(BusyError, match="drained"):
        fleet.reserve("a", "xy")
    with pytest.raises(BusyError, match="drained"):
        fleet.open_handoff("r", "a", "b")
    with pytest.raises(BusyError, match="drained"):
        fleet.open_handoff("r", "b", "a")
    located = fleet.ask(
        Locate(identity_digest=fleet.identity.digest(), hashes=chain("ab")), Located
    )
    # It still serves what it has.
    assert located.avoid == ("a",)
    assert located.holders[0].source.instance_id == "a"


def test_a_drained_life_does_not_come_back_and_a_new_one_may() -> None:
    fleet = fleet_of("a", "b")
    drain(fleet, "a")
    tick(fleet)
    with pytest.raises(DrainedError, match="a was drained"):
        fleet.enter(info("a", 20), returning=True)
    fleet.enter(info("a", 20, incarnation=2))
    assert state_of(fleet, "a") == "live"
    assert drain(fleet, "a", incarnation=Incarnation(1)).is_over
    with pytest.raises(StaleError):
        drain(fleet, "a", incarnation=Incarnation(3))
    assert state_of(fleet, "a") == "live"


def test_who_is_not_there_cannot_be_drained() -> None:
    with pytest.raises(NotFoundError, match="unknown instance"):
        drain(fleet_of("a"), "b")
    with pytest.raises(BadInputError, match="deadline_s"):
        drain(fleet_of("a"), "a", deadline_s=0.0)


def test_what_its_last_requests_leave_moves_too_when_they_have_ended() -> None:
    fleet = fleet_of("a", "b")
    fleet.compute("a", admit("r", "ab"))
    drain(fleet, "a")
    move_all(fleet, "b")
    fleet.step("a", running=(runs("r", 4 * BLOCK_TOKENS),))
    fleet.step(
        "a",
        progress=(wrote("r", 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1, chain("abc")[2:]),),
        releases=(release("r"),),
    )
    tick(fleet)
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("abc")[2:]]
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped, over.moved[0].num_blocks) == (True, 0, 3)


def test_who_comes_back_cannot_be_drained_before_it_has_told_all_that_it_holds() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    before = fleet.restart()
    fleet.register("b", 20)
    commands = come_back(fleet, before, "a")
    fleet.send(next(commands))
    with pytest.raises(RestoringError, match="told all"):
        drain(fleet, "a")
    assert state_of(fleet, "a") == "returning"
    for command in commands:
        fleet.send(command)
    assert drain(fleet, "a").num_cached_blocks == 2
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")]
