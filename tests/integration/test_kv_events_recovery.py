"""Readers of KV events that miss some: gaps, restarts, a reader that does not read (B49)."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.integration.kv_events_peer import (
    LIMIT_S,
    ONE,
    Pool,
    Relay,
    following,
    poll_until,
    publishing,
    relayed,
    stored,
    wait_until_published,
)

from kvferry.cluster.kv_events_publisher import (
    KvEventsPublisher,
)
from kvferry.cluster.kv_events_sequence import Lost, Received, Restarted
from kvferry.proto.kv_events import KvEvent


@pytest.fixture
def relay() -> Iterator[tuple[KvEventsPublisher, Relay]]:
    with relayed() as both:
        yield both


def test_a_reader_that_comes_later_or_again_is_told_everything() -> None:
    pool = Pool(capacity=5)
    with publishing() as publisher:
        for _ in range(4):
            publisher.publish(pool.step(2))
        with following(publisher) as first:
            poll_until(first, lambda: first.held.hashes() == pool.hashes())
            publisher.publish(pool.step(1))
            poll_until(first, lambda: first.held.hashes() == pool.hashes())
        publisher.publish(pool.step(3))
        with following(publisher) as second:
            updates = poll_until(second, lambda: second.held.hashes() == pool.hashes())
            publisher.publish(pool.step(1))
            updates += poll_until(second, lambda: second.held.hashes() == pool.hashes())
            assert second.held.complete
    assert [update.seq for update in updates if isinstance(update, Received)] == list(range(7))


def test_a_lost_message_is_recovered_and_order_does_not_matter(
    relay: tuple[KvEventsPublisher, Relay],
) -> None:
    publisher, network = relay
    pool = Pool(capacity=100)
    number = network.take_first(publisher, pool.step(1))
    with following(publisher, endpoint=network.endpoint, check_every_s=1000.0) as reader:
        network.wait_for_reader()
        for _ in range(5):
            publisher.publish(pool.step(1))
        messages = [network.take() for _ in range(5)]
        for index in (0, 3, 2, 4):
            network.give(messages[index])
        updates = poll_until(reader, lambda: reader.held.hashes() >= pool.hashes())
        publisher.publish(pool.step(1))
        network.give(network.take())
        updates += poll_until(reader, lambda: reader.held.hashes() >= pool.hashes())
    assert [update.seq for update in updates if isinstance(update, Received)] == list(
        range(number + 6)
    )
    assert reader.held.complete


def test_the_loss_of_the_last_message_is_noticed_without_another(
    relay: tuple[KvEventsPublisher, Relay],
) -> None:
    publisher, network = relay
    network.take_first(publisher, ONE)
    with following(publisher, endpoint=network.endpoint) as reader:
        network.wait_for_reader()
        poll_until(reader, lambda: 1 in reader.held.hashes())
        publisher.publish((stored(2, parent=1),))
        network.take()
        poll_until(reader, lambda: reader.held.hashes() == {1, 2})


def test_without_a_replay_endpoint_a_gap_is_reported_in_time(
    relay: tuple[KvEventsPublisher, Relay],
) -> None:
    publisher, network = relay
    number = network.take_first(publisher, ONE)
    with following(publisher, endpoint=network.endpoint, replay=False, gap_wait_s=0.2) as reader:
        network.wait_for_reader()
        publisher.publish((stored(2),))
        network.give(network.take())
        updates = poll_until(reader, lambda: len(reader.held) > 0)
    assert updates[0] == Lost(0, number)
    assert (reader.held.hashes(), reader.held.complete) == ({2}, False)


def test_a_silent_replay_endpoint_is_given_up_in_time(
    relay: tuple[KvEventsPublisher, Relay],
) -> None:
    publisher, network = relay
    number = network.take_first(publisher, ONE)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        following(
            publisher,
            endpoint=network.endpoint,
            replay_endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}",
            gap_wait_s=0.2,
        ) as reader,
    ):
        network.wait_for_reader()
        publisher.publish((stored(2),))
        network.give(network.take())
        updates = poll_until(reader, lambda: len(reader.held) > 0)
    assert updates[0] == Lost(0, number)


def test_messages_that_are_none_are_counted_and_passed_over(
    relay: tuple[KvEventsPublisher, Relay],
) -> None:
    publisher, network = relay
    network.take_first(publisher, ONE)
    with following(publisher, endpoint=network.endpoint) as reader:
        network.wait_for_reader()
        network.give([b"kv@d0", b"short", b""])
        network.give([b"kv@d0"])
        network.give([b"kv@d01", bytes(8), b"of another topic"])
        publisher.publish((stored(2),))
        network.give(network.take())
        poll_until(reader, lambda: reader.held.hashes() == {1, 2})
        assert reader.refused_messages == 2
        assert reader.held.complete


def test_what_is_forgotten_is_reported_and_a_snapshot_wanted() -> None:
    pool = Pool(capacity=3)
    with publishing(buffer_batches=2) as publisher:
        for _ in range(6):
            publisher.publish(pool.step(1))
        wait_until_published(publisher, 6)
        assert not publisher.snapshot_wanted()
        with following(publisher) as reader:
            updates = poll_until(reader, lambda: len(reader.held) > 0)
            assert updates[0] == Lost(0, 4)
            assert not reader.held.complete
            assert publisher.snapshot_wanted()
            assert not publisher.snapshot_wanted()
            publisher.publish(pool.snapshot())
            poll_until(reader, lambda: reader.held.complete)
            assert reader.held.hashes() == pool.hashes()


def test_b49_a_reader_that_does_not_read_never_holds_up_the_producer() -> None:
    pool = Pool(capacity=500)
    with publishing(queue_batches=1000, send_batches=500, buffer_batches=200) as publisher:
        reading = following(publisher, receive_batches=500)
        with reading as reader:
            publisher.publish(pool.step(1))
            poll_until(reader, lambda: len(reader.held) > 0)
            puts_s = []
            for _ in range(10_000):
                events = pool.step(10)
                started = time.perf_counter()
                publisher.publish(events)
                puts_s.append(time.perf_counter() - started)
            # Generous for a busy machine: the point is that nobody waits for a reader.
            assert sorted(puts_s)[9_990] < 0.05
            assert max(puts_s) < 2.0
            counters = publisher.counters()
            assert counters.dropped_batches > 0
            assert publisher.snapshot_wanted()
            wait_until_published(publisher, 10_001 - counters.dropped_batches)
            assert publisher.publish(pool.snapshot())
            updates = poll_until(
                reader, lambda: reader.held.complete and reader.held.hashes() == pool.hashes()
            )
    told = sum(isinstance(update, Received) for update in updates)
    lost = sum(update.end_seq - update.start_seq for update in updates if isinstance(update, Lost))
    assert lost >= counters.dropped_batches
    assert told + lost == 10_001


def test_a_reader_that_falls_behind_recovers_all_that_is_remembered() -> None:
    tokens = tuple(range(5000))
    with (
        publishing(send_batches=10) as publisher,
        following(publisher, receive_batches=10) as reader,
    ):
        publisher.publish(ONE)
        poll_until(reader, lambda: len(reader.held) == 1)
        # Far more bytes than the system's own socket buffers hold.
        for number in range(2, 2000):
            publisher.publish((replace(stored(number), token_ids=tokens),))
        wait_until_published(publisher, 1999)
        updates = poll_until(reader, lambda: len(reader.held) == 1999)
        assert [update.seq for update in updates if isinstance(update, Received)] == list(
            range(1, 1999)
        )
        assert reader.held.complete
        assert publisher.counters().dropped_batches == 0
        assert not publisher.snapshot_wanted()


class Slow(tuple[KvEvent, ...]):
    """Events whose encoding waits until the test lets it go on."""

    __slots__ = ()
    begun = threading.Event()
    may_end = threading.Event()

    def __iter__(self) -> Iterator[KvEvent]:
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)
        return super().__iter__()


def test_a_full_queue_drops_counts_and_shows_as_a_gap() -> None:
    with publishing(queue_batches=3) as publisher, following(publisher) as reader:
        assert publisher.publish(Slow(ONE))
        assert Slow.begun.wait(LIMIT_S)
        assert [publisher.publish((stored(number),)) for number in range(10, 16)] == [
            *[True] * 3,
            *[False] * 3,
        ]
        assert publisher.counters().dropped_batches == 3
        Slow.may_end.set()
        wait_until_published(publisher, 4)
        assert publisher.publish((stored(99),))
        updates = poll_until(reader, lambda: 99 in reader.held.hashes())
        assert reader.held.hashes() == {1, 10, 11, 12, 99}
        assert [update for update in updates if isinstance(update, Lost)] == [Lost(4, 7)]
        assert publisher.snapshot_wanted()


def test_a_batch_that_cannot_be_encoded_is_a_gap_and_not_the_end() -> None:
    with publishing() as publisher, following(publisher) as reader:
        publisher.publish((stored(2**64),))
        publisher.publish(ONE)
        updates = poll_until(reader, lambda: reader.held.hashes() == {1})
        assert updates[0] == Lost(0, 1)
        assert publisher.counters().failed_batches == 1
        assert publisher.snapshot_wanted()


@pytest.mark.parametrize("num_before", [1, 3])
def test_a_restarted_publisher_is_followed_from_its_beginning(num_before: int) -> None:
    with publishing() as old, following(old) as reader:
        for number in range(num_before):
            old.publish((stored(number),))
        poll_until(reader, lambda: len(reader.held) == num_before)
        places = {"endpoint": old.endpoint, "replay_endpoint": old.replay_endpoint, "bind": True}
        old.close()
        with publishing(**places) as new:
            new.publish((stored(77),))
            new.publish((stored(78),))
            updates = poll_until(reader, lambda: reader.held.hashes() == {77, 78})
            assert Restarted() in updates
            assert reader.held.complete


def test_a_restarted_publisher_with_nothing_to_say_is_noticed() -> None:
    with publishing() as old, following(old, gap_wait_s=0.5) as reader:
        old.publish(ONE)
        poll_until(reader, lambda: len(reader.held) == 1)
        places = {"endpoint": old.endpoint, "replay_endpoint": old.replay_endpoint, "bind": True}
        old.close()
        with publishing(**places):
            assert poll_until(reader, lambda: len(reader.held) == 0) == [Restarted()]
