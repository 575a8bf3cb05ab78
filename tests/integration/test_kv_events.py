"""KV events over real ZeroMQ sockets: vLLM's frames, endpoints, requests, the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from tests.integration.kv_events_peer import (
    LIMIT_S,
    ONE,
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
    PublisherCounters,
    PublisherSettings,
)
from kvferry.cluster.kv_events_sequence import Update
from kvferry.cluster.kv_events_subscriber import KvEventsSubscriber, SubscriberSettings
from kvferry.proto.errors import (
    ConfigError,
    InsecureBindError,
    PortTakenError,
    UnavailableError,
)
from kvferry.proto.kv_events import AllBlocksCleared, BlockRemoved
from kvferry.proto.kv_events_codec import decode_batch


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


@contextmanager
def asking(publisher: KvEventsPublisher, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    """Connect a plain socket, as other readers have it, to the replay endpoint."""
    assert publisher.replay_endpoint is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(kind) as made:
        made.linger = 0
        made.rcvtimeo = int(LIMIT_S * 1000)
        made.connect(publisher.replay_endpoint)
        yield made


@pytest.fixture
def relay() -> Iterator[tuple[KvEventsPublisher, Relay]]:
    with relayed() as both:
        yield both


def test_a_live_message_has_the_frames_and_bytes_of_vllm() -> None:
    settings = PublisherSettings(topic="kv@d0", encoding="array", data_parallel_rank=3)
    publisher = KvEventsPublisher(settings, clock=lambda: 1.5)
    relay = Relay(publisher)
    events = (stored(1, 2, parent=7), BlockRemoved(block_hashes=(1,)), AllBlocksCleared())
    number = relay.take_first(publisher, ONE)
    publisher.publish(events)
    topic, sent_seq, payload = relay.take()
    assert (topic, sent_seq) == (b"kv@d0", seq(number))
    assert payload == bytes.fromhex(
        "93cb3ff800000000000093"
        "99ab426c6f636b53746f7265649201020792000101c0a3475055c0c0"
        "93ac426c6f636b52656d6f7665649101a3475055"
        "91b0416c6c426c6f636b73436c656172656403"
    )
    relay.close()
    publisher.close()


@pytest.mark.parametrize("form", ["plain", "topic"])
def test_a_replay_has_the_replies_of_both_forms(form: str) -> None:
    topic = [b"kv@d0"] if form == "topic" else []
    empty = [b""] if form == "topic" else []
    with publishing(replay_form=form) as publisher:
        for _ in range(3):
            publisher.publish(ONE)
        wait_until_published(publisher, 3)
        with asking(publisher) as reader:
            reader.send_multipart([b"", seq(1)])
            replies = [reader.recv_multipart() for _ in range(3)]
        assert [reply[:-1] for reply in replies] == [
            [b"", *topic, seq(1)],
            [b"", *topic, seq(2)],
            [b"", *empty, b"\xff" * 8],
        ]
        assert decode_batch(replies[0][-1]).events == ONE
        assert replies[-1][-1] == b""
        # A REQ socket adds and takes away the empty frame, and reads one reply.
        with asking(publisher, zmq.REQ) as reader:
            reader.send(seq(2))
            assert reader.recv_multipart()[:-1] == [*topic, seq(2)]


def test_requests_of_a_wrong_form_are_counted_and_not_answered() -> None:
    with publishing() as publisher:
        publisher.publish(ONE)
        wait_until_published(publisher, 1)
        with asking(publisher) as reader:
            for request in ([b""], [b"", b"short"], [b"x", seq(0)], [b"", seq(0), b"more"]):
                reader.send_multipart(request)
            reader.send_multipart([b"", seq(0)])
            assert reader.recv_multipart()[2] == seq(0)
        assert publisher.counters() == PublisherCounters(
            published_batches=1,
            dropped_batches=0,
            failed_batches=0,
            replays=1,
            refused_requests=4,
        )


def test_publishers_may_connect_to_one_reader_each_with_its_topic_and_sequence() -> None:
    settings = SubscriberSettings(
        endpoint="tcp://127.0.0.1:*", topic="kv@d1", bind=True, gap_wait_s=0.2
    )
    with pytest.raises(InsecureBindError):
        KvEventsSubscriber(SubscriberSettings(endpoint="tcp://*:*", bind=True))
    reader = KvEventsSubscriber(settings)
    place = reader.endpoint
    with (
        publishing(topic="kv@d1", endpoint=place, bind=False) as ours,
        publishing(topic="kv@d10", endpoint=place, bind=False) as other,
    ):
        deadline = time.monotonic() + LIMIT_S
        updates: list[Update] = []
        while not updates:
            assert time.monotonic() < deadline
            ours.publish(ONE)
            other.publish((stored(2),))
            updates = reader.poll(0.4)
        assert reader.held.hashes() == {1}
    reader.close()


def test_a_publisher_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    for change in ({"endpoint": "tcp://*:*"}, {"replay_endpoint": "tcp://0.0.0.0:*"}):
        with pytest.raises(InsecureBindError):
            KvEventsPublisher(PublisherSettings(**change))  # type: ignore[arg-type]
    with publishing() as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        with pytest.raises(PortTakenError):
            KvEventsPublisher(PublisherSettings(endpoint=publisher.endpoint, bind=True))
    with publishing(endpoint="tcp://*:*", insecure=True) as publisher:
        assert publisher.endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "tcp://192.0.2.1:*", "insecure": True},
        {"endpoint": "nonsense", "bind": False},
        {"replay_endpoint": "tcp://127.0.0.1:port"},
        {"queue_batches": 0},
        {"encoding": "msgpack"},
        {"replay_form": "0.17"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        KvEventsPublisher(PublisherSettings(**change))  # type: ignore[arg-type]


def test_a_closed_publisher_has_sent_what_was_queued_and_takes_no_more(
    relay: tuple[KvEventsPublisher, Relay],
) -> None:
    publisher, network = relay
    number = network.take_first(publisher, ONE)
    for _ in range(20):
        publisher.publish(ONE)
    publisher.close()
    assert [network.take()[1] for _ in range(20)] == [seq(number + more) for more in range(20)]
    with pytest.raises(UnavailableError):
        publisher.publish(ONE)


def test_a_step_without_events_uses_no_number() -> None:
    with publishing() as publisher, following(publisher) as reader:
        assert publisher.publish(())
        publisher.publish(ONE)
        poll_until(reader, lambda: len(reader.held) == 1)
        assert publisher.counters().published_batches == 1
