"""Blocks that a caller copies itself out of a peer's memory: only what held counts as copied."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.arenas import needs_arenas
from tests.contract.exchange import Exchange, exchanging
from tests.contract.test_pull_layouts_failures import CUT, ONE

from kvferry.proto.errors import DeadlineError
from kvferry.proto.ids import FIRST_GROUP, Incarnation, InstanceId, LeaseId
from kvferry.proto.step_messages import Source
from kvferry.worker.frames import Header
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.shared_blocks import SharedBlocks

pytestmark = needs_arenas

NUM_BLOCKS = 5


class Reader:
    """Asks an exchange's source for blocks, and keeps the keys and values it was shown."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.shown: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
        self.cancel = threading.Event()

    def read(self, **changes: int) -> int:
        exchange = self.exchange
        return exchange.takers[0].read_shared(
            source=Source(
                instance_id=InstanceId("source"),
                incarnation=Incarnation(changes.get("incarnation", 1)),
                layout=exchange.source,
                rank_addresses=tuple(exchange.addresses),
            ),
            lease_id=LeaseId(""),
            group_id=FIRST_GROUP,
            hashes=exchange.load(0, NUM_BLOCKS).hashes,
            read=self.copy,
            timeout_s=20.0,
            cancel=self.cancel,
        )

    @property
    def failures(self) -> dict[str, int]:
        return self.exchange.takers[0].stats().transfers["pulled", "shm"].failures

    def copy(self, shared: SharedBlocks) -> None:
        shared.terms.require_s()
        self.shown = [
            np.concatenate(side[shared.block_ids])
            for layer in shared.memory.host_layers()
            for side in layer
        ]

    def has_dense(self, num_tokens: int) -> bool:
        wanted = [side[:num_tokens] for layer in self.exchange.dense for side in layer]
        found = [side[:num_tokens] for side in self.shown]
        return all(map(np.array_equal, found, wanted)) and len(found) == len(wanted)


@pytest.mark.parametrize("order", ["LSBNH", "BLSNH", "LBHNS"])
def test_a_peer_of_any_memory_order_is_read_in_place_once_its_memory_is_mapped(order: str) -> None:
    with exchanging(
        replace(ONE, memory=order), ONE, num_blocks=NUM_BLOCKS, paths=["shm"]
    ) as exchange:
        reader = Reader(exchange)
        assert reader.read() == 0
        assert exchange.senders[0].stats().of("served").num_started == 0
        assert exchange.pull(0).num_blocks_of_run == (NUM_BLOCKS,)
        assert reader.read() == NUM_BLOCKS
        assert reader.has_dense(NUM_BLOCKS * ONE.block_tokens)
        pulled = exchange.takers[0].stats()
        assert pulled.num_blocks_pulled == 2 * NUM_BLOCKS
        assert pulled.transfers["pulled", "shm"].num_started == 2


@pytest.mark.parametrize("lost", [0, 3])
def test_what_was_handed_out_anew_after_the_copy_does_not_count_nor_what_comes_after_it(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exchanging(ONE, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        reader = Reader(exchange)
        exchange.pull(0)
        copy = reader.copy

        def overtaken(shared: SharedBlocks) -> None:
            copy(shared)
            exchange.lose(0, lost)

        monkeypatch.setattr(reader, "copy", overtaken)
        assert reader.read() == lost
        assert reader.has_dense(lost * ONE.block_tokens)
        assert reader.failures == {"NotFoundError": 1}


def test_a_copy_may_take_longer_than_a_peer_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with exchanging(ONE, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        reader = Reader(exchange)
        exchange.pull(0)
        monkeypatch.setattr(exchange.takers[0]._fetcher, "_stall_s", 0.1)
        copy = reader.copy

        def slow(shared: SharedBlocks) -> None:
            copy(shared)
            time.sleep(0.3)
            exchange.lose(0, 3)

        monkeypatch.setattr(reader, "copy", slow)
        assert reader.read() == 3
        assert reader.failures == {"NotFoundError": 1}


def test_of_a_peer_that_is_silent_the_caller_is_told_since_a_pull_would_wait_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    def frozen(_: object) -> Iterator[Header | OutgoingFrame]:
        goes_on.wait(20.0)
        return iter(())

    with exchanging(ONE, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        reader = Reader(exchange)
        exchange.pull(0)
        monkeypatch.setattr(exchange.takers[0]._fetcher, "_stall_s", 0.1)
        monkeypatch.setattr(exchange.senders[0], "open_fetch", frozen)
        with pytest.raises(DeadlineError, match="sent nothing for too long"):
            reader.read()
        assert reader.shown == []
        goes_on.set()


def test_a_peer_that_lost_a_block_before_is_read_up_to_it() -> None:
    with exchanging(ONE, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        reader = Reader(exchange)
        exchange.pull(0)
        exchange.lose(0, 2)
        assert reader.read() == 2
        assert len(reader.shown[0]) == 2 * ONE.block_tokens


def test_nothing_is_read_of_another_layout_or_life_or_after_a_cancel() -> None:
    with exchanging(CUT, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        exchange.pull(0)
        assert Reader(exchange).read() == 0
    with exchanging(ONE, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        exchange.pull(0)
        reader = Reader(exchange)
        assert reader.read(incarnation=9) == 0
        reader.cancel.set()
        assert reader.read() == 0
        assert reader.shown == []


def test_of_a_peer_that_does_not_offer_its_memory_nothing_is_read() -> None:
    with exchanging(ONE, ONE, num_blocks=NUM_BLOCKS, paths=["shm"]) as exchange:
        exchange.pull(0)
        door = exchange.senders[0]._door
        exchange.senders[0]._door = None
        reader = Reader(exchange)
        assert reader.read() == 0
        assert reader.shown == []
        exchange.senders[0]._door = door
        assert reader.read() == NUM_BLOCKS
