"""The stores of a node when their coordinator is restarted: what they hold is found again."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from socket import create_server

import pytest
import torch
from tests.builders import make_identity

from kvferry.cluster import store_watch
from kvferry.cluster.client import Ferry, connect
from kvferry.cluster.coordinator_process import CoordinatorProcess, FrontSettings
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_client import NodeClient
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.record import FRONTS, ProcessRecord
from kvferry.proto.errors import KvferryError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import FIRST_GROUP, pack_group
from kvferry.worker.reservations import reserving

BLOCK_TOKENS = 4
SCHEME = make_scheme(hash_block_tokens=BLOCK_TOKENS)
IDENTITIES = [make_identity(num_layers=2, weight_version=f"v{i}") for i in range(2)]
NUM_BLOCKS = 8
BLOCK_BYTES = IDENTITIES[0].block_bytes(BLOCK_TOKENS)
PROMPTS = [[100 * number + i for i in range(3 * BLOCK_TOKENS)] for number in range(4)]


class Restarting:
    """A node, and one life after another of the coordinator before it."""

    def __init__(self) -> None:
        self._record = ProcessRecord()
        self.coordinator = self._live()
        config = NodeConfig(
            host="127.0.0.1",
            coordinator=self.coordinator.start().control,
            store_bytes=NUM_BLOCKS * BLOCK_BYTES,
            port=0,
        )
        self.node = StoreNode(config, lambda: str(self._record.read(FRONTS)["control"]))
        self.address = self.node.start()

    def _live(self) -> CoordinatorProcess:
        life = CoordinatorProcess(
            record=self._record,
            fronts=FrontSettings(),
            reach_host=lambda: "127.0.0.1",
            scheme=SCHEME,
            check_invariants=True,
        )
        life.start()
        return life

    def restart(self) -> None:
        self.coordinator.stop()
        self.coordinator = self._live()

    def move(self) -> None:
        """Restart at another port, as on another machine."""
        port = int(self.coordinator.start().control.rpartition(":")[2])
        self.coordinator.stop()
        with create_server(("127.0.0.1", port)) as taken:
            self.coordinator = self._live()
            taken.close()

    def stop(self) -> None:
        self.node.stop()
        self.coordinator.stop()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Restarting]:
    monkeypatch.setattr(store_watch, "WATCH_S", 0.02)
    one = Restarting()
    with closing(NodeClient(one.address)) as engine:
        for identity in IDENTITIES:
            engine.attach(identity, timeout_s=10.0)
    yield one
    one.stop()


@pytest.fixture
def ferry(service: Restarting) -> Iterator[Ferry]:
    """A client through the node, as engines are."""
    with connect(service.address, timeout_s=5.0) as connected:
        yield connected


def layers_of(value: float) -> list[torch.Tensor]:
    return [torch.full((2, 3 * BLOCK_TOKENS, 1, 8), value) for _ in range(2)]


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for what may fail until the coordinator and the stores are back."""
    end_s = time.monotonic() + 10.0
    while True:
        try:
            if is_true():
                return
        except KvferryError:
            pass
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.01)


def num_back(ferry: Ferry) -> int:
    return sum(one.state == "live" for one in ferry.describe().instances)


def test_what_was_stored_is_found_and_fetched_in_the_coordinators_next_life(
    service: Restarting, ferry: Ferry
) -> None:
    epoch = ferry.describe().epoch
    caches = [ferry.model(identity) for identity in IDENTITIES]
    for value, cache in enumerate(caches):
        assert cache.store(PROMPTS[0], layers_of(float(value))) == 12
    service.restart()
    wait_until(lambda: num_back(ferry) == 2)
    assert ferry.describe().epoch == epoch + 1
    for value, cache in enumerate(caches):
        into = layers_of(9.0)
        assert cache.fetch(PROMPTS[0], into) == 12
        assert all(bool((layer == value).all()) for layer in into)
        assert cache.store(PROMPTS[1], layers_of(5.0)) == 12


def test_a_node_finds_a_coordinator_that_comes_back_elsewhere(
    service: Restarting, ferry: Ferry
) -> None:
    cache = ferry.model(IDENTITIES[0])
    cache.store(PROMPTS[0], layers_of(1.0))
    service.move()
    wait_until(lambda: num_back(ferry) == 2)
    assert cache.fetch(PROMPTS[0], layers_of(0.0)) == 12
    assert cache.store(PROMPTS[1], layers_of(1.0)) == 12


def test_what_was_stored_first_has_to_leave_first_afterwards(
    service: Restarting, ferry: Ferry
) -> None:
    cache = ferry.model(IDENTITIES[0])
    for prompt in PROMPTS[:2]:
        cache.store(prompt, layers_of(1.0))
    service.restart()
    wait_until(lambda: num_back(ferry) == 2)
    assert cache.store(PROMPTS[2], layers_of(2.0)) == 12
    found = [cache.lookup(prompt).num_tokens for prompt in PROMPTS[:3]]
    # Seven blocks: two of the first prompt had to make room.
    assert found[1:] == [12, 12]
    assert found[0] < 12


def test_what_was_reset_before_the_restart_is_dropped_by_a_store_that_has_not_heard_of_it(
    service: Restarting, ferry: Ferry
) -> None:
    cache = ferry.model(IDENTITIES[0])
    cache.store(PROMPTS[0], layers_of(1.0))
    assert cache.reset() == 3
    service.restart()
    wait_until(lambda: num_back(ferry) == 2)
    assert cache.lookup(PROMPTS[0]).num_tokens == 0
    cache.store(PROMPTS[0], layers_of(2.0))
    into = layers_of(0.0)
    assert cache.fetch(PROMPTS[0], into) == 12
    assert all(bool((layer == 2.0).all()) for layer in into)


def test_a_store_comes_back_when_those_who_write_into_it_have_ended_and_tells_that_too(
    service: Restarting, ferry: Ferry
) -> None:
    worker = service.node._stores[IDENTITIES[0]].worker._started()
    assert worker.reserver is not None
    hashes = hash_tokens(SCHEME, PROMPTS[0])[:1]
    with reserving(worker.reserver, worker.residency, FIRST_GROUP, hashes) as reservation:
        (block,) = reservation.block_ids
        assert block is not None
        service.restart()
        wait_until(lambda: num_back(ferry) == 1)
        assert len(ferry.describe().instances) == 1
        worker.residency.mark_written(
            [(pack_group(hashes[0], FIRST_GROUP), block)], reservation.num_resets
        )
        reservation.num_written = 1
    wait_until(lambda: num_back(ferry) == 2)
    assert ferry.model(IDENTITIES[0]).lookup(PROMPTS[0]).num_blocks == 1
