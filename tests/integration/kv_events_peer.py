"""A pool that tells what it does, and a network between publisher and reader that can be told."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from kvferry.cluster.kv_events_publisher import KvEventsPublisher, PublisherSettings
from kvferry.cluster.kv_events_sequence import Update
from kvferry.cluster.kv_events_subscriber import KvEventsSubscriber, SubscriberSettings
from kvferry.proto.errors import PortTakenError
from kvferry.proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

LIMIT_S = 60.0


def stored(*hashes: int, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tuple(range(len(hashes))),
        block_size=1,
    )


ONE = (stored(1),)


class Pool:
    """A chain of blocks of which the newest `capacity` are kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: deque[int] = deque()
        self._next = 0

    def step(self, num_blocks: int) -> tuple[KvEvent, ...]:
        """Store new blocks, each told alone, and remove as many of the oldest as is needed."""
        events: list[KvEvent] = []
        for _ in range(num_blocks):
            events.append(stored(self._next, parent=self._next - 1 if self._next else None))
            self._held.append(self._next)
            self._next += 1
            if len(self._held) > self._capacity:
                events.append(BlockRemoved(block_hashes=(self._held.popleft(),)))
        return tuple(events)

    def snapshot(self) -> tuple[KvEvent, ...]:
        return (AllBlocksCleared(), stored(*self._held))

    def hashes(self) -> set[int]:
        return set(self._held)


@contextmanager
def publishing(**settings: object) -> Iterator[KvEventsPublisher]:
    """Run a publisher; a port that its last owner is just giving back is waited for."""
    values: dict[str, object] = {"topic": "kv@d0"}
    made = PublisherSettings(**(values | settings))  # type: ignore[arg-type]
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            publisher = KvEventsPublisher(made)
            break
        except PortTakenError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def following(
    publisher: KvEventsPublisher, *, replay: bool = True, **settings: object
) -> Iterator[KvEventsSubscriber]:
    """Follow a publisher."""
    values: dict[str, object] = {
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint if replay else None,
        "topic": "kv@d0",
        "gap_wait_s": 10.0,
        "check_every_s": 0.2,
    }
    subscriber = KvEventsSubscriber(
        SubscriberSettings(**(values | settings))  # type: ignore[arg-type]
    )
    try:
        yield subscriber
    finally:
        subscriber.close()


def poll_until(subscriber: KvEventsSubscriber, reached: Callable[[], bool]) -> list[Update]:
    """Return all updates up to when something holds."""
    deadline = time.monotonic() + LIMIT_S
    updates: list[Update] = []
    while not reached():
        assert time.monotonic() < deadline, (updates[-5:], len(subscriber.held))
        updates += subscriber.poll(0.1)
    return updates


class Relay:
    """Stands between publisher and reader; the test passes on what it likes."""

    def __init__(self, publisher: KvEventsPublisher) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(publisher.endpoint)
        self._pub = context.socket(zmq.XPUB)
        self._pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_reader(self) -> None:
        """Wait until a reader has subscribed."""
        assert self._pub.poll(int(LIMIT_S * 1000))
        assert self._pub.recv()[:1] == b"\x01"

    def take(self) -> list[bytes]:
        """Return the next message."""
        assert self._sub.poll(int(LIMIT_S * 1000))
        return self._sub.recv_multipart()

    def take_first(self, publisher: KvEventsPublisher, events: tuple[KvEvent, ...]) -> int:
        """Publish until the first message arrives, since a subscription takes a while.

        Returns:
            The number of batches published.
        """
        num_published = 0
        while num_published == 0 or not self._sub.poll(20):
            assert num_published < 1000
            publisher.publish(events)
            num_published += 1
        while int.from_bytes(self.take()[1], "big") < num_published - 1:
            pass
        return num_published

    def give(self, frames: list[bytes]) -> None:
        """Pass a message on."""
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._sub.close(linger=0)
        self._pub.close(linger=0)


@contextmanager
def relayed() -> Iterator[tuple[KvEventsPublisher, Relay]]:
    """Run a publisher with a relay behind it."""
    with publishing() as publisher:
        relay = Relay(publisher)
        try:
            yield publisher, relay
        finally:
            relay.close()


def wait_until_published(publisher: KvEventsPublisher, num_batches: int) -> None:
    """Wait until so many batches have been sent."""
    deadline = time.monotonic() + LIMIT_S
    while publisher.counters().published_batches < num_batches:
        assert time.monotonic() < deadline
        time.sleep(0.005)
