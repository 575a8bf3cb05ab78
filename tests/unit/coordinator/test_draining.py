"""A drained instance does nothing new, and what only it holds comes to peers before it goes."""

from typing import Any

import pytest
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

from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import BadInputError, BusyError, DrainedError, NotFoundError, StaleError
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.messages import Heard, Heartbeat, Locate, Located, Tick
from kvferry.proto.step_messages import Move, MoveEnd

BLOCK_BYTES = Fleet().identity.block_bytes(BLOCK_TOKENS)


def drain(fleet: Fleet, name: str, deadline_s: float = 60.0, **more: Any) -> Drained:
    command = Drain(instance_id=InstanceId(name), deadline_s=deadline_s, **more)
    return fleet.ask(command, Drained)


def tick(fleet: Fleet, seconds: float = 0.5) -> None:
    fleet.now += seconds
    fleet.send(Tick())


def moves_of(fleet: Fleet, name: str) -> tuple[Move, ...]:
    return fleet.step(name).moves


def end(fleet: Fleet, name: str, move: Move, num_written: int | None = None) -> tuple[Move, ...]:
    """Report a move that brought everything, or so much; return what is to be moved next."""
    count = len(move.hashes) if num_written is None else num_written
    ended = MoveEnd(reservation_id=move.reservation_id, num_written=count)
    return fleet.step(name, moves_ended=(ended,)).moves


def move_all(fleet: Fleet, name: str) -> list[Move]:
    """Carry out everything an instance is told to move."""
    done: list[Move] = []
    moves = list(moves_of(fleet, name))
    while moves:
        done.append(moves.pop(0))
        moves += end(fleet, name, done[-1])
    return done


def state_of(fleet: Fleet, name: str) -> str:
    return next(i.state for i in fleet.describe().instances if i.info.instance_id == name)


def fleet_of(*names: str, num_blocks: int = 20, **settings: Any) -> Fleet:
    fleet = Fleet(**settings)
    for name in names:
        fleet.register(name, num_blocks)
    return fleet


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


def test_what_was_used_last_moves_first() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    fleet.cache("a", "xy")
    fleet.cache("a", "ab")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert move.hashes == (*chain("ab"), *chain("xy"))


def test_what_a_running_request_uses_moves_before_what_is_only_kept() -> None:
    fleet = fleet_of("a", "b")
    fleet.compute("a", admit("r", "pq"))
    fleet.cache("a", "xy")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert move.hashes == (*chain("pq"), *chain("xy"))


def test_what_peers_hold_anyway_stays_where_it_is() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("b", "ab")
    fleet.cache("a", "abc")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert move.hashes == chain("abc")[2:]
    end(fleet, "b", move)
    tick(fleet)
    assert drain(fleet, "a").num_elsewhere == 2
    assert fleet.locate("abc") == {"b": 3}


def test_a_block_goes_to_the_peer_that_has_the_chain_before_it() -> None:
    fleet = fleet_of("a", "b", "c")
    fleet.cache("c", "ab")
    fleet.cache("a", "abc")
    drain(fleet, "a")
    assert moves_of(fleet, "b") == ()
    (move,) = moves_of(fleet, "c")
    assert move.hashes == chain("abc")[2:]


def test_a_chain_that_does_not_fit_where_its_beginning_is_goes_elsewhere_as_a_whole() -> None:
    fleet = Fleet()
    fleet.register("a", 20)
    fleet.register("b", 8)
    fleet.register("c", 7)
    fleet.cache("a", "abcdefxy")
    fleet.cache("a", "abcd12")
    drain(fleet, "a")
    got = {name: [h for m in move_all(fleet, name) for h in m.hashes] for name in ("b", "c")}
    assert got["b"] == [*chain("abcd12"), chain("abcde")[-1]]
    assert got["c"] == [*chain("abcdef")]


def test_a_peer_gives_up_a_quarter_of_its_blocks_at_most_the_coldest() -> None:
    fleet = fleet_of("a", "b", num_blocks=17)
    fleet.cache("b", "0123456789abcde")  # one of its 16 holds nothing
    fleet.cache("a", "pqrstuv")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert move.hashes == chain("pqrst")
    end(fleet, "b", move)
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped) == (True, 2)
    # The coldest are the ends of chains.
    assert fleet.locate("0123456789abcde") == {"b": 11}


def test_moves_leave_an_eighth_of_the_pool_to_requests() -> None:
    fleet = fleet_of("a", "b", num_blocks=17)
    fleet.compute("b", admit("r", "0123456789abc"))  # 14 of 16 blocks
    fleet.cache("a", "pq")
    drain(fleet, "a")
    assert moves_of(fleet, "b") == ()


def test_a_running_request_waits_for_moves_instead_of_being_preempted() -> None:
    fleet = fleet_of("a", "b", num_blocks=9)
    fleet.compute("b", admit("r", "012"))
    fleet.cache("a", "pqr")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert len(move.hashes) == 3
    reply = fleet.step("b", running=(runs("r", 8 * BLOCK_TOKENS),))
    assert (reply.scheduled, reply.preempted) == ((), ())
    ended = MoveEnd(reservation_id=move.reservation_id, num_written=3)
    reply = fleet.step("b", moves_ended=(ended,), running=(runs("r", 8 * BLOCK_TOKENS),))
    assert len(reply.scheduled) == 1


def test_a_move_that_brought_a_part_leaves_the_rest_behind() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "abcd")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert end(fleet, "b", move, num_written=3) == ()
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped, over.moved[0].num_blocks) == (True, 1, 3)
    assert fleet.describe().counters["failed_moves"] == 1


def test_the_end_of_more_than_was_moved_is_refused_and_changes_nothing() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    with pytest.raises(BadInputError, match="num_written"):
        end(fleet, "b", move, num_written=3)
    end(fleet, "b", move)
    assert fleet.locate("ab")["b"] == 2


def test_what_a_dead_peer_was_to_get_goes_to_another() -> None:
    fleet = fleet_of("a", "b", "c")
    fleet.cache("a", "ab")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    fleet.remove("b")
    assert fleet.describe().num_leases == 0
    (again,) = moves_of(fleet, "c")
    assert again.hashes == move.hashes


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
    with pytest.raises(StaleError):
        drain(fleet, "a", incarnation=Incarnation(1))


def test_who_is_not_there_cannot_be_drained() -> None:
    with pytest.raises(NotFoundError, match="unknown instance"):
        drain(fleet_of("a"), "b")
    with pytest.raises(BadInputError, match="deadline_s"):
        drain(fleet_of("a"), "a", deadline_s=0.0)


@pytest.mark.parametrize(
    "changes", [{"covers": 2}, {"scheme": None}], ids=["blocks of another size", "as they are"]
)
def test_only_peers_with_blocks_of_the_same_size_take_any(changes: dict[str, Any]) -> None:
    changes = {name: value for name, value in changes.items() if value is not None}
    fleet = fleet_of("a")
    fleet.enter(info("b", 20, identity=fleet.identity, **changes))
    fleet.cache("a", "abcd")
    drain(fleet, "a")
    assert len(moves_of(fleet, "b")) == (0 if changes else 1)


def test_a_store_hears_of_its_moves_in_its_heartbeat() -> None:
    fleet = fleet_of("a")
    fleet.register("s", 20, role="store", max_model_len=0)
    fleet.cache("a", "ab")
    drain(fleet, "a")
    beat = Heartbeat(
        epoch=fleet.service.epoch, instance_id=InstanceId("s"), incarnation=Incarnation(1)
    )
    (move,) = fleet.ask(beat, Heard).moves
    assert fleet.ask(beat, Heard).moves == ()
    assert fleet.end_reservation("s", move.reservation_id, 2)
    assert fleet.locate("ab")["s"] == 2


def test_a_reset_fences_what_is_moved_into_a_store() -> None:
    fleet = fleet_of("a")
    fleet.register("s", 20, role="store", max_model_len=0)
    fleet.cache("a", "ab")
    drain(fleet, "a")
    beat = Heartbeat(
        epoch=fleet.service.epoch, instance_id=InstanceId("s"), incarnation=Incarnation(1)
    )
    (move,) = fleet.ask(beat, Heard).moves
    fleet.reset()
    assert not fleet.end_reservation("s", move.reservation_id, 2)
    assert fleet.locate("ab")["s"] == 0


def test_all_groups_of_a_hybrid_move_together() -> None:
    fleet = fleet_of("a", "b", num_blocks=60, identity=HYBRID)
    fleet.cache("a", "abcdef")
    held = fleet.locate("abcdef")["a"]
    assert held == 6
    drain(fleet, "a")
    moved = move_all(fleet, "b")
    assert {move.group_id for move in moved} == {0, 1, 2, 3}
    assert fleet.locate("abcdef")["b"] == held


def test_content_that_grows_meanwhile_is_not_moved() -> None:
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
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped) == (True, 1)
