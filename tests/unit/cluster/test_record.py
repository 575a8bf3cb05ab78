"""What of a service outlives its coordinator, and where a front that moves is found."""

import pytest

from kvferry.cluster.moving_address import MovingAddress
from kvferry.cluster.ray_record import find_front
from kvferry.cluster.record import ProcessRecord, RecordRegistry
from kvferry.coordinator.registry import Memory
from kvferry.proto.errors import StaleError, UnavailableError
from kvferry.proto.ids import Epoch


def test_the_first_epoch_is_the_time_and_each_later_one_is_one_more() -> None:
    record = ProcessRecord()
    assert RecordRegistry(record, lambda: 1700000000.9).begin() == Memory(epoch=Epoch(1700000000))
    assert RecordRegistry(record, lambda: 5.0).begin() == Memory(epoch=Epoch(1700000001))


def test_a_life_knows_the_resets_that_were_saved_before_it() -> None:
    registry = RecordRegistry(ProcessRecord(), lambda: 7.0)
    memory = Memory(epoch=registry.begin().epoch, resets={b"\x00\xff": 3})
    registry.save(memory)
    assert registry.begin() == Memory(epoch=Epoch(8), resets={b"\x00\xff": 3})


def test_a_life_that_is_over_saves_nothing() -> None:
    registry = RecordRegistry(ProcessRecord(), lambda: 7.0)
    old = registry.begin()
    registry.begin()
    with pytest.raises(StaleError) as refused:
        registry.save(Memory(epoch=old.epoch, resets={b"x": 1}))
    assert (refused.value.given, refused.value.allowed) == (7, 8)
    assert registry.begin().resets == {}


def test_a_process_outside_ray_is_told_that_it_cannot_look_anything_up() -> None:
    with pytest.raises(UnavailableError, match="not connected to a Ray cluster"):
        find_front("a service")()


def test_an_address_is_looked_up_again_once_for_all_who_find_nobody_together() -> None:
    told = ["b:2", "c:3"]
    place = MovingAddress("a:1", lambda: told.pop(0))
    assert str(place) == "a:1"
    place.look_again()
    place.look_again()
    assert (str(place), told) == ("b:2", ["c:3"])


def test_an_address_stays_as_it_is_where_nobody_tells_another() -> None:
    def nobody() -> str:
        raise UnavailableError("away")

    for place in (MovingAddress("a:1"), MovingAddress("a:1", nobody)):
        place.look_again()
        assert str(place) == "a:1"
