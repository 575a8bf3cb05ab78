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
    HYBRID,
    Fleet,
    admit,
    chain,
    info,
    release,
    runs,
    wrote,
)
from tests.unit.coordinator.returning import come_back, requests_command

from kvferry.coordinator import draining
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
    fleet = fleet_of("a", "b", suspect_after_s=1e6, dead_after_s=2e6)
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


def test_a_suspect_that_is_the_only_peer_is_waited_for_until_it_is_heard() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    fleet.wait(2.0, "a")
    assert fleet.states() == {"a": "live", "b": "suspect"}
    drain(fleet, "a")
    fleet.wait(3.0, "a")
    assert state_of(fleet, "a") == "draining"
    fleet.beat("b")
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")]
    tick(fleet)
    assert (drain(fleet, "a").is_over, drain(fleet, "a").num_dropped) == (True, 0)


def test_a_suspect_is_waited_for_until_it_is_dead() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    fleet.wait(2.0, "a")
    drain(fleet, "a")
    fleet.wait(7.5, "a")
    assert not drain(fleet, "a").is_over
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.seconds, over.num_dropped) == (True, 8.0, 2)


def test_a_suspect_is_waited_for_until_the_deadline() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    fleet.wait(2.0, "a")
    drain(fleet, "a", deadline_s=1.0)
    fleet.wait(0.5, "a")
    assert not drain(fleet, "a").is_over
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.seconds, over.num_dropped) == (True, 1.0, 2)


def test_what_was_planned_for_a_suspect_comes_to_it_once_it_is_heard() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    drain(fleet, "a")
    tick(fleet)
    assert drain(fleet, "a").num_waiting == 2
    fleet.wait(2.0, "a")
    assert fleet.states() == {"a": "draining", "b": "suspect"}
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")]
    tick(fleet)
    assert drain(fleet, "a").num_dropped == 0


def test_a_peer_that_comes_back_is_waited_for() -> None:
    fleet = fleet_of("a")
    fleet.cache("a", "ab")
    fleet.enter(info("b", 20, identity=fleet.identity), returning=True)
    drain(fleet, "a")
    fleet.wait(1.0, "a", "b")
    assert state_of(fleet, "a") == "draining"
    fleet.send(requests_command(fleet, "b"))
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")]


def test_whom_a_restarted_coordinator_has_not_heard_yet_is_waited_for() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    before = fleet.restart()
    for command in come_back(fleet, before, "a"):
        fleet.send(command)
    drain(fleet, "a")
    fleet.wait(1.0, "a")
    assert state_of(fleet, "a") == "draining"
    for command in come_back(fleet, before, "b"):
        fleet.send(command)
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")]
    tick(fleet)
    assert drain(fleet, "a").num_dropped == 0


def test_after_a_restart_nobody_is_waited_for_longer_than_a_silent_member() -> None:
    fleet = fleet_of("a")
    fleet.cache("a", "ab")
    before = fleet.restart()
    for command in come_back(fleet, before, "a"):
        fleet.send(command)
    drain(fleet, "a")
    fleet.wait(9.5, "a")
    assert state_of(fleet, "a") == "draining"
    tick(fleet)
    assert drain(fleet, "a").num_dropped == 2


def test_what_a_request_writes_over_cold_blocks_of_a_full_pool_moves_too() -> None:
    fleet = Fleet()
    fleet.register("a", 5)
    fleet.register("b", 20)
    fleet.cache("a", "xy")
    fleet.compute("a", admit("r", "a", allow_remote=False))
    assert fleet.num_free("a") == 2
    drain(fleet, "a")
    assert [move.hashes for move in move_all(fleet, "b")] == [(*chain("a"), *chain("xy"))]
    fleet.step("a", running=(runs("r", 3 * BLOCK_TOKENS),))
    # As many blocks as before hold something.
    assert fleet.locate("xy")["a"] == 1
    fleet.step(
        "a",
        progress=(wrote("r", 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, chain("ab")[1:]),),
        releases=(release("r"),),
    )
    tick(fleet)
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")[1:]]
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped) == (True, 0)


def test_what_a_peer_held_too_moves_elsewhere_when_that_peer_dies() -> None:
    fleet = fleet_of("a", "b")
    for name in "ab":
        fleet.cache(name, "xyz")
    fleet.lease("xyz", ttl_s=20.0, at="a")
    drain(fleet, "a")
    tick(fleet)
    fleet.register("c", 20)
    fleet.remove("b")
    tick(fleet)
    assert [move.hashes for move in move_all(fleet, "c")] == [chain("xyz")]
    tick(fleet, 20.0)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_elsewhere, over.num_dropped) == (True, 0, 0)


def test_the_next_life_of_a_full_peer_gets_what_fitted_nowhere() -> None:
    fleet = fleet_of("a", num_blocks=20)
    fleet.register("b", 6)
    fleet.cache("a", "abcdef")
    fleet.lease("a", ttl_s=20.0, at="a")
    fleet.compute("b", admit("r", "wxyz"))
    drain(fleet, "a")
    tick(fleet)
    assert moves_of(fleet, "b") == ()
    fleet.register("b", 40, incarnation=Incarnation(2), rank_pids=(2,))
    tick(fleet)
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("abcdef")]


def test_what_peers_hold_in_every_group_counts_once_for_each_block() -> None:
    fleet = fleet_of("a", "b", num_blocks=60, identity=HYBRID)
    for name in "ab":
        fleet.cache(name, "abcdef")
    begun = drain(fleet, "a")
    tick(fleet)
    assert (drain(fleet, "a").num_elsewhere, begun.num_cached_blocks) == (24, 24)


def test_only_the_last_drains_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_REMEMBERED_DRAINS", 2)
    fleet = fleet_of("a", "b", "c")
    for name in "abc":
        drain(fleet, name)
        tick(fleet)
    fleet.enter(info("c", 20, incarnation=2))
    drain(fleet, "c")
    tick(fleet)
    assert list(fleet.service.state.drained) == ["b", "c"]
    with pytest.raises(NotFoundError, match="unknown instance"):
        drain(fleet, "a")
    assert drain(fleet, "b").is_over
    assert drain(fleet, "c").incarnation == 2
