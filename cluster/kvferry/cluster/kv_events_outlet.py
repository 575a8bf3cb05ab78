"""Publishes the KV events of all instances of a service: a publisher for each, under its own topic.

A publisher lives as long as the coordinator, not as long as its instance: the next life of an
instance goes on with the next number, so its readers need neither a new endpoint nor a new start.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.cluster.kv_events_publisher import KvEventsPublisher, PublisherSettings
from kvferry.cluster.kv_events_translation import kv_events
from kvferry.coordinator.pool_events import PoolEvent
from kvferry.proto.bind import reachable_address
from kvferry.proto.ids import InstanceId
from kvferry.proto.kv_events import HashForm
from kvferry.proto.kv_events_endpoint import endpoint_of_rank
from kvferry.proto.messages import KvEventsPlace

# Telling everything costs time under the coordinator's lock.
SNAPSHOT_EVERY_S = 5.0


def topic_of(instance_id: InstanceId) -> str:
    """Return the topic of an instance's events."""
    return f"kv@{instance_id}"


@dataclass(slots=True)
class _Stream:
    """One instance's publisher, and what its readers have to be told."""

    publisher: KvEventsPublisher
    topic: str
    wants_snapshot: bool = False
    last_snapshot_s: float = -SNAPSHOT_EVERY_S


class KvEventsOutlet:
    """`EventOutlet` over ZeroMQ. Not thread-safe: the coordinator's lock guards it.

    Args:
        settings: of every publisher, but for the topic. A port counts up from instance to instance
            in order of registration, unless the system chooses.
        hash_form: how hashes are told.
        reach_host: the address by which others reach this machine, told where a publisher listens
            at all of them.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        hash_form: HashForm,
        reach_host: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._hash_form = hash_form
        self._reach_host = reach_host
        self._clock = clock
        self._streams: dict[InstanceId, _Stream] = {}

    def open(self, instance_id: InstanceId) -> None:
        """Start an instance's publisher if it has none.

        Raises:
            PortTakenError: another process listens at the endpoint.
            ConfigError, InsecureBindError: the endpoint cannot be used.
        """
        if instance_id in self._streams:
            return
        topic, number, settings = topic_of(instance_id), len(self._streams), self._settings
        endpoint, replay = settings.endpoint, settings.replay_endpoint
        if settings.listens:
            endpoint = endpoint_of_rank(endpoint, number)
        if replay is not None:
            replay = endpoint_of_rank(replay, number)
        own = replace(settings, endpoint=endpoint, replay_endpoint=replay, topic=topic)
        self._streams[instance_id] = _Stream(KvEventsPublisher(own), topic)

    def publish(self, instance_id: InstanceId, events: Sequence[PoolEvent]) -> None:
        """Queue the events of one command as an instance's next batch."""
        form = self._hash_form
        self._streams[instance_id].publisher.publish(tuple(kv_events(events, form)))

    def place(self, instance_id: InstanceId) -> KvEventsPlace | None:
        """Return where an instance's events can be read; None where the reader listens."""
        stream = self._streams[instance_id]
        if not self._settings.listens:
            return None
        replay = stream.publisher.replay_endpoint
        return KvEventsPlace(
            endpoint=reachable_address(stream.publisher.endpoint, self._reach_host),
            replay_endpoint=None if replay is None else reachable_address(replay, self._reach_host),
            topic=stream.topic,
        )

    def due_snapshots(self) -> list[InstanceId]:
        """Return once the instances whose readers miss what no replay brings back.

        An instance is named at most every `SNAPSHOT_EVERY_S` seconds.
        """
        now_s, due = self._clock(), []
        for instance_id, stream in self._streams.items():
            stream.wants_snapshot |= stream.publisher.snapshot_wanted()
            if stream.wants_snapshot and now_s - stream.last_snapshot_s >= SNAPSHOT_EVERY_S:
                stream.wants_snapshot, stream.last_snapshot_s = False, now_s
                due.append(instance_id)
        return due

    def close(self) -> None:
        """Send what is queued, for a short while, and stop all publishers."""
        for stream in self._streams.values():
            stream.publisher.close()
