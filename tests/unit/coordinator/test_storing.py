"""Reservations: destination blocks for what clients are about to store."""

import pytest
from tests.unit.coordinator.fleet import Fleet, admit

from kvferry.proto.errors import BadInputError, BusyError, NeverFitsError, NotFoundError


def test_a_reservation_becomes_findable_as_far_as_it_was_written(fleet: Fleet) -> None:
    fleet.cache("a", "x")
    reserved = fleet.reserve("a", "xyz")
    assert reserved.block_ids == (None, 2, 3)
    # x is kept as well: without it the rest could not be found.
    assert fleet.num_free("a") == 6
    assert fleet.locate("xyz")["a"] == 1
    assert fleet.end_reservation("a", reserved.reservation_id, num_written=2)
    assert fleet.locate("xyz")["a"] == 2
    assert fleet.num_free("a") == 9
    with pytest.raises(NotFoundError, match="reservation"):
        fleet.end_reservation("a", reserved.reservation_id, num_written=2)


def test_a_reservation_that_nobody_ends_expires_and_leaves_nothing_findable(fleet: Fleet) -> None:
    # As when the reply that named it was lost.
    lost = fleet.reserve("a", "xy")
    fleet.now = 299.0
    later = fleet.reserve("a", "z")
    fleet.now = 300.0
    assert fleet.locate("xy")["a"] == 0
    assert fleet.num_free("a") == 8
    with pytest.raises(NotFoundError, match="ended reservation"):
        fleet.end_reservation("a", lost.reservation_id, num_written=2)
    assert fleet.end_reservation("a", later.reservation_id, num_written=1)
    assert fleet.num_free("a") == 9


def test_reserving_what_is_held_reserves_nothing(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    reserved = fleet.reserve("a", "xy")
    assert reserved.block_ids == (None, None)
    fleet.end_reservation("a", reserved.reservation_id, num_written=0)
    assert fleet.locate("xy")["a"] == 2


def test_a_reservation_without_room_is_refused_and_changes_nothing(fleet: Fleet) -> None:
    fleet.compute("a", admit("r", "xyzw"))
    with pytest.raises(BusyError, match="needed_blocks=5, free_blocks=4"):
        fleet.reserve("a", "pqrst")
    with pytest.raises(NeverFitsError, match="needed_blocks=10, have_blocks=9"):
        fleet.reserve("a", "0123456789")
    assert fleet.num_free("a") == 4


def test_more_cannot_be_written_than_was_reserved(fleet: Fleet) -> None:
    reserved = fleet.reserve("a", "xy")
    with pytest.raises(BadInputError, match="given: 3; allowed: 0 to 2"):
        fleet.end_reservation("a", reserved.reservation_id, num_written=3)
    assert fleet.num_free("a") == 7
