"""After a reset nothing from before is found in a store, and nothing from before becomes so."""

from dataclasses import replace

import pytest
from tests.unit.coordinator.fleet import IDENTITY, Fleet, admit, failed, loaded

from kvferry.coordinator.pool_events import Cleared
from kvferry.proto.errors import NotFoundError
from kvferry.proto.instance_stats import Held
from kvferry.proto.messages import InstanceStatus, RenewLease, ResetIdentity

OTHER = replace(IDENTITY, weight_version="2")


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(tells_pool_events=True)
    made.register("store", role="store", max_model_len=0)
    return made


def store(fleet: Fleet, text: str, name: str = "store") -> None:
    """Store the blocks of a text, owned by nobody afterwards."""
    reserved = fleet.reserve(name, text)
    assert fleet.end_reservation(name, reserved.reservation_id, len(text))


def status(fleet: Fleet, name: str = "store") -> InstanceStatus:
    (found,) = [one for one in fleet.describe().instances if one.info.instance_id == name]
    return found


def test_what_a_store_holds_is_forgotten_and_its_blocks_are_free(fleet: Fleet) -> None:
    store(fleet, "xyz")
    fleet.service.take_pool_events()
    assert fleet.reset() == 3
    assert fleet.locate("xyz") == {"store": 0}
    assert (status(fleet).num_cached_blocks, status(fleet).num_used_blocks) == (0, 0)
    assert fleet.service.take_pool_events() == [("store", [Cleared()])]
    assert fleet.describe().counters["resets"] == 1
    assert fleet.reset() == 0


def test_what_is_stored_after_a_reset_is_found(fleet: Fleet) -> None:
    store(fleet, "xyz")
    fleet.reset()
    store(fleet, "xy")
    assert fleet.locate("xyz") == {"store": 2}


def test_what_is_being_stored_does_not_become_findable(fleet: Fleet) -> None:
    store(fleet, "x")
    reserved = fleet.reserve("store", "xyz")
    assert fleet.reset() == 1
    assert status(fleet).held == Held(reservations=1, reserved_blocks=2)
    assert not fleet.end_reservation("store", reserved.reservation_id, 3)
    assert fleet.locate("xyz") == {"store": 0}
    assert (status(fleet).num_cached_blocks, status(fleet).num_used_blocks) == (0, 0)


def test_a_reservation_after_a_reset_does_not_wait_for_one_before_it(fleet: Fleet) -> None:
    before = fleet.reserve("store", "xyz")
    fleet.reset()
    after = fleet.reserve("store", "xyz")
    assert (before.num_resets, after.num_resets) == (0, 1)
    assert set(before.block_ids).isdisjoint(after.block_ids)
    assert fleet.end_reservation("store", after.reservation_id, 3)
    assert not fleet.end_reservation("store", before.reservation_id, 3)
    assert fleet.locate("xyz") == {"store": 3}


def test_leases_on_a_store_end(fleet: Fleet) -> None:
    store(fleet, "xyz")
    leased = fleet.lease("xyz")
    assert leased.lease_id is not None
    fleet.reset()
    assert fleet.describe().num_leases == 0
    with pytest.raises(NotFoundError, match="unknown or ended lease"):
        fleet.send(RenewLease(call_id="r", lease_id=leased.lease_id, ttl_s=1.0))


def test_a_load_from_a_store_that_was_reset_may_end_as_any_other(fleet: Fleet) -> None:
    store(fleet, "xyz")
    fleet.register("decode")
    fleet.admit_load("decode", admit("r", "xyz"))
    fleet.reset()
    fleet.step("decode", load_results=(loaded("r", 4, failed(1, "NotFoundError")),))
    assert fleet.locate("xyz") == {"decode": 1, "store": 0}


def test_another_identity_keeps_its_blocks(fleet: Fleet) -> None:
    fleet.register("theirs", identity=OTHER, role="store", max_model_len=0)
    store(fleet, "xyz", "theirs")
    store(fleet, "xy")
    assert fleet.reset() == 2
    assert status(fleet, "theirs").num_cached_blocks == 3
    assert fleet.reserve("theirs", "w").num_resets == 0
    assert fleet.reset(OTHER) == 3


def test_instances_that_compute_keep_theirs(fleet: Fleet) -> None:
    store(fleet, "xyz")
    fleet.register("decode")
    fleet.cache("decode", "xy")
    assert fleet.reset() == 3
    assert fleet.locate("xyz") == {"decode": 2, "store": 0}


def test_all_stores_of_an_identity_are_reset(fleet: Fleet) -> None:
    fleet.register("too", role="store", max_model_len=0)
    store(fleet, "xyz")
    store(fleet, "xy", "too")
    assert fleet.reset() == 5
    assert fleet.locate("xyz") == {"store": 0, "too": 0}


def test_an_identity_that_nobody_stores_is_no_error(fleet: Fleet) -> None:
    assert fleet.reset(OTHER) == 0


def test_a_repeat_of_the_same_call_forgets_nothing_more(fleet: Fleet) -> None:
    store(fleet, "xyz")
    command = ResetIdentity(call_id="once", identity_digest=IDENTITY.digest())
    reply = fleet.send(command)
    store(fleet, "xy")
    assert fleet.send(command) == reply
    assert fleet.locate("xyz") == {"store": 2}
    assert fleet.reserve("store", "w").num_resets == 1
