"""Each store of a node is heard, whatever the others are at."""

import threading
from collections.abc import Iterator

import pytest
from tests.waiting import wait_until

from kvferry.cluster import store_watch
from kvferry.cluster.store_watch import StoreWatch
from kvferry.proto.errors import NotRegisteredError


class Store:
    """Beats, until it has to come back, which takes until `may_return` is set."""

    def __init__(self) -> None:
        self.num_beats = 0
        self.num_returns = 0
        self.is_lost = False
        self.may_return = threading.Event()

    def beat(self) -> None:
        if self.is_lost:
            raise NotRegisteredError("unknown instance")
        self.num_beats += 1

    def come_back(self) -> None:
        self.num_returns += 1
        assert self.may_return.wait(20.0)
        self.is_lost = False


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Store]]:
    monkeypatch.setattr(store_watch, "WATCH_S", 0.005)
    both = Store(), Store()
    watch = StoreWatch(lambda: both)
    yield both
    for store in both:
        store.may_return.set()
    watch.stop()


def test_a_store_that_takes_long_to_come_back_silences_no_other(
    stores: tuple[Store, Store],
) -> None:
    lost, other = stores
    lost.is_lost = True
    wait_until(lambda: lost.num_returns == 1)
    before = other.num_beats
    wait_until(lambda: other.num_beats >= before + 10)
    assert lost.num_returns == 1  # once at a time
    beats = lost.num_beats
    lost.may_return.set()
    wait_until(lambda: lost.num_beats > beats)


def test_a_look_while_a_store_beats_is_made_up_for_at_once_when_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_watch, "WATCH_S", 600.0)
    store = Store()
    store.is_lost = True
    watch = StoreWatch(lambda: [store])
    try:
        watch.look()
        wait_until(lambda: store.num_returns == 1)
        watch.look()
        watch.look()
        store.may_return.set()
        wait_until(lambda: store.num_beats == 1)
    finally:
        watch.stop()
