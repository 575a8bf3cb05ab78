"""What of an instance that goes comes to which peer, in which order, and how a move ends."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.coordinator.drains import (
    BLOCK_BYTES,
    drain,
    end,
    fleet_of,
    move_all,
    moves_of,
    tick,
)
from tests.unit.coordinator.fleet import (
    BLOCK_TOKENS,
    HYBRID,
    Fleet,
    admit,
    chain,
    info,
    runs,
)
from tests.unit.coordinator.returning import blocks_command, held_blocks, requests_command

from kvferry.coordinator import drain_plan, moving
from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import InstanceId
from kvferry.proto.step_messages import MoveEnd


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


def test_what_a_move_did_not_bring_is_moved_again_twice_and_then_left_behind() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "abcd")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    (second,) = end(fleet, "b", move, num_written=3)
    assert second.hashes == chain("abcd")[3:]
    (third,) = end(fleet, "b", second, num_written=0)
    assert third.hashes == chain("abcd")[3:]
    tick(fleet)
    assert drain(fleet, "a").num_waiting == 1
    assert end(fleet, "b", third, num_written=0) == ()
    tick(fleet)
    over = drain(fleet, "a")
    assert (over.is_over, over.num_dropped, over.moved[0].num_blocks) == (True, 1, 3)
    assert fleet.describe().counters["failed_moves"] == 3


def test_what_did_not_come_to_one_peer_goes_to_another_with_the_chain_before_it() -> None:
    fleet = fleet_of("a", "b", "c")
    fleet.cache("a", "abc")
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    assert move.hashes == chain("abc")
    assert end(fleet, "b", move, num_written=2) == ()
    (again,) = moves_of(fleet, "c")
    assert again.hashes == chain("abc")
    end(fleet, "c", again)
    tick(fleet)
    assert drain(fleet, "a").num_dropped == 0


def test_a_group_of_a_hybrid_that_did_not_come_is_moved_again() -> None:
    fleet = fleet_of("a", "b", num_blocks=60, identity=HYBRID)
    fleet.cache("a", "abcdef")
    drain(fleet, "a")
    first, *moves = moves_of(fleet, "b")
    moves += end(fleet, "b", first, num_written=0)
    while moves:
        moves += end(fleet, "b", moves.pop(0))
    assert fleet.locate("abcdef")["b"] == 6
    tick(fleet)
    assert drain(fleet, "a").num_dropped == 0


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


def test_a_store_hears_of_its_moves_in_its_heartbeat_until_they_have_ended() -> None:
    fleet = fleet_of("a")
    fleet.register("s", 20, role="store", max_model_len=0)
    fleet.cache("a", "ab")
    drain(fleet, "a")
    (move,) = fleet.beat("s").moves
    fleet.now += 1.0
    # The first answer may have been lost.
    assert fleet.beat("s").moves == (replace(move, ttl_s=move.ttl_s - 1.0),)
    assert fleet.num_free("s") == 17
    assert fleet.end_reservation("s", move.reservation_id, 2)
    assert fleet.locate("ab")["s"] == 2
    assert fleet.beat("s").moves == ()


def test_a_move_whose_source_is_not_leased_any_more_is_not_said_again() -> None:
    fleet = fleet_of("a", suspect_after_s=1e6, dead_after_s=2e6)
    fleet.register("s", 20, role="store", max_model_len=0)
    fleet.cache("a", "ab")
    drain(fleet, "a", deadline_s=100.0)
    (move,) = fleet.beat("s").moves
    fleet.now += move.ttl_s
    assert fleet.beat("s").moves == ()


def test_a_reset_fences_what_is_moved_into_a_store() -> None:
    fleet = fleet_of("a")
    fleet.register("s", 20, role="store", max_model_len=0)
    fleet.cache("a", "ab")
    drain(fleet, "a")
    (move,) = fleet.beat("s").moves
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


def test_what_was_told_after_a_restart_moves_too_though_nobody_knows_its_chains() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "abcd")
    before = fleet.restart()
    fleet.register("b", 20)
    fleet.enter(info("a", 20, identity=fleet.identity), returning=True)
    held = list(held_blocks(before.state.instance(InstanceId("a"))))
    fleet.send(blocks_command(fleet, "a", held))
    fleet.send(requests_command(fleet, "a"))
    drain(fleet, "a")
    (move,) = moves_of(fleet, "b")
    end(fleet, "b", move)
    assert fleet.locate("abcd") == {"a": 4, "b": 4}


def test_a_chain_that_was_moved_can_be_moved_on() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "abcd")
    drain(fleet, "a")
    move_all(fleet, "b")
    tick(fleet)
    fleet.register("c", 20)
    fleet.register("d", 4)
    fleet.cache("d", "ab")
    drain(fleet, "b")
    # One has the beginning and room for one more; what comes after that is of use only with all.
    assert [move.hashes for move in move_all(fleet, "d")] == [chain("abc")[2:]]
    assert [move.hashes for move in move_all(fleet, "c")] == [chain("abcd")]


def test_two_moves_at_once_each_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MAX_MOVE_BYTES", 3 * BLOCK_BYTES + 1)
    fleet = fleet_of("a", "b", num_blocks=40)
    fleet.cache("a", "abcdefghi")
    drain(fleet, "a")
    first, second = moves_of(fleet, "b")
    assert (first.hashes, second.hashes) == (chain("abc"), chain("abcdef")[3:])
    assert moves_of(fleet, "b") == ()
    (third,) = end(fleet, "b", first)
    assert third.hashes == chain("abcdefghi")[6:]


def test_a_long_plan_is_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_plan, "_SLICE", 4)
    fleet = fleet_of("a", "b", num_blocks=40)
    fleet.cache("a", "abcdefghi")
    drain(fleet, "a")
    assert [len(move.hashes) for move in move_all(fleet, "b")] == [4, 4, 1]
    tick(fleet)
    assert drain(fleet, "a").num_dropped == 0


def test_nothing_is_moved_from_the_next_life_of_who_was_to_go() -> None:
    fleet = fleet_of("a", "b")
    fleet.cache("a", "ab")
    drain(fleet, "a")
    tick(fleet)  # it is planned now
    fleet.remove("a")
    fleet.register("a", 20)
    fleet.cache("a", "ab")
    assert moves_of(fleet, "b") == ()
