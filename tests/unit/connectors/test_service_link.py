"""How the scheduler half's questions end when the service does not answer."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.builders import make_identity

from kvferry.cluster.connectors import service_link
from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.prefixes import NOTHING
from kvferry.cluster.connectors.service_link import NUM_THREADS, ServiceLink
from kvferry.proto.errors import DeadlineError, UnavailableError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import BlockHash

HASHES = (BlockHash(bytes(32)),)
TIMEOUT_S = 20.0


class HangingStore:
    """A service whose answers are all late, at one moment, and that refuses a reset."""

    store_id = None

    def __init__(self) -> None:
        self.num_asked = 0
        self.all_threads_ask = threading.Barrier(NUM_THREADS + 1)

    def holders(self, *_: Any) -> Any:
        self.num_asked += 1
        self.all_threads_ask.wait(TIMEOUT_S)
        raise DeadlineError("no answer")

    def reset(self, _: Identity) -> None:
        raise UnavailableError("nobody there")


@pytest.fixture
def store() -> HangingStore:
    return HangingStore()


@pytest.fixture
def link(store: HangingStore) -> Iterator[ServiceLink]:
    link = ServiceLink(cast("EngineStore", store), make_identity())
    yield link
    link.close()


def test_a_service_that_hangs_costs_one_timeout_and_not_one_for_each_waiting_request(
    store: HangingStore, link: ServiceLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_link, "PAUSE_AFTER_FAILURE_S", 60.0)
    answers = [link.look_up(HASHES) for _ in range(5 * NUM_THREADS)]
    store.all_threads_ask.wait(TIMEOUT_S)
    assert [answer.result(TIMEOUT_S) for answer in answers] == [NOTHING] * len(answers)
    assert store.num_asked == NUM_THREADS
    assert link.num_failed == NUM_THREADS
    assert link.is_away
    assert link.look_up(HASHES).done()


def test_a_reset_that_fails_says_so(link: ServiceLink) -> None:
    assert not link.reset()
