"""What `Describe` says keeps an instance's blocks in place."""

from dataclasses import replace

from tests.unit.coordinator.fleet import HYBRID, Fleet, admit, failed, loaded, release, wrote

from kvferry.proto.ids import InstanceId
from kvferry.proto.instance_stats import Held
from kvferry.proto.messages import InstanceStatus


def status(fleet: Fleet, name: str) -> InstanceStatus:
    (found,) = [i for i in fleet.describe().instances if i.info.instance_id == InstanceId(name)]
    return found


def test_an_instance_that_nobody_waits_for_holds_nothing(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    assert status(fleet, "a").held == Held()


def test_leased_blocks_count_once_at_the_instance_that_has_them(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.lease("xyz")
    fleet.lease("xy")
    assert status(fleet, "a").held == Held(leases=2, leased_blocks=3)
    assert status(fleet, "b").held == Held()


def test_reserved_blocks_are_those_that_are_not_here_already(fleet: Fleet) -> None:
    fleet.cache("a", "x")
    reserved = fleet.reserve("a", "xyz")
    assert status(fleet, "a").held == Held(reservations=1, reserved_blocks=2)
    fleet.end_reservation("a", reserved.reservation_id, 3)
    assert status(fleet, "a").held == Held()


def test_destinations_of_a_load_are_quarantined_from_when_it_is_given_up_to_its_result(
    fleet: Fleet,
) -> None:
    fleet.cache("a", "xyzw")
    fleet.cache("b", "x")
    fleet.admit_load("b", admit("r", "xyzw"))
    loading = Held(loads=1, loading_blocks=3)
    assert status(fleet, "b").held == loading
    assert status(fleet, "a").held == Held(leases=1, leased_blocks=3)
    fleet.step("b", releases=(release("r"),))
    assert status(fleet, "b").held == replace(loading, quarantined_blocks=3)
    fleet.step("b", load_results=(loaded("r", 4, failed(1, "Cancelled")),))
    assert status(fleet, "b").held == Held()


def test_groups_are_written_only_where_their_rule_needs_it() -> None:
    fleet = Fleet(identity=HYBRID)
    fleet.register("a", num_blocks=40)
    fleet.register("b", num_blocks=40)
    fleet.cache("a", "xyzw")
    load = fleet.admit_load("b", admit("r", "xyzw"))
    destinations = sum(block != 0 for table in load.block_ids for block in table)
    assert status(fleet, "b").held == Held(loads=1, loading_blocks=destinations)
    assert destinations < 4 * len(load.block_ids)


def test_cached_blocks_count_copies_too(fleet: Fleet) -> None:
    for name in ("r", "s"):
        fleet.admit("a", admit(name, "xy", allow_remote=False))
    assert status(fleet, "a").num_cached_blocks == 0
    fleet.step("a", progress=(wrote("r", 9, 9), wrote("s", 9, 9)))
    assert status(fleet, "a").num_cached_blocks == 4
    fleet.step("a", releases=(release("r"), release("s")))
    assert status(fleet, "a").num_cached_blocks == 4
