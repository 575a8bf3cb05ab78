"""Publishes the KV events of all instances of a service: a publisher for each, under its own topic.

A publisher lives as long as the coordinator, not as long as its instance: the next life of an
instance goes on with the next number, so its readers need neither a new endpoint nor a new start.
The next life of the coordinator publishes at the same endpoints, as far as they are free.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.cluster.kv_events_publisher import KvEventsPublisher, PublisherSettings
from kvferry.cluster.kv_events_translation import kv_events
from kvferry.cluster.record import KV_EVENTS, KV_REPLAYS, Record
from kvferry.coordinator.pool_events import PoolEvent
from kvferry.proto.bind import reachable_address
from kvferry.proto.errors import KvferryError, PortTakenError
from kvferry.proto.ids import InstanceId
from kvferry.proto.kv_events import HashForm
from kvferry.proto.kv_events_endpoint import endpoint_of_rank
from kvferry.proto.messages import KvEventsPlace

# Telling everything costs time under the coordinator's lock.
SNAPSHOT_EVERY_S = 5.0

_log = logging.getLogger(__name__)


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
            in order of their first registration, unless the system chooses.
        hash_form: how hashes are told.
        reach_host: the address by which others reach this machine, told where a publisher listens
            at all of them.
        record: remembers the endpoints for the next life of the coordinator.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        hash_form: HashForm,
        reach_host: Callable[[], str],
        record: Record,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without instances.

        Raises:
            UnavailableError: the record cannot be read.
        """
        self._settings = settings
        self._hash_form = hash_form
        self._reach_host = reach_host
        self._clock = clock
        self._streams: dict[InstanceId, _Stream] = {}
        self._record = record
        self._kept: dict[str, str] = record.read(KV_EVENTS)
        self._kept_replays: dict[str, str] = record.read(KV_REPLAYS)

    def open(self, instance_id: InstanceId) -> None:
        """Start an instance's publisher if it has none.

        Raises:
            PortTakenError: another process listens at the endpoint.
            ConfigError, InsecureBindError: the endpoint cannot be used.
        """
        if instance_id in self._streams:
            return
        publisher = self._publisher(instance_id)
        self._streams[instance_id] = _Stream(publisher, topic_of(instance_id))
        self._keep(instance_id, publisher)

    def _publisher(self, instance_id: InstanceId) -> KvEventsPublisher:
        """Return one at the endpoints that the instance had, or at those that the settings say.

        Raises:
            KvferryError: as `KvEventsPublisher`.
        """
        known = list(self._kept)
        number = known.index(instance_id) if instance_id in known else len(known)
        made = replace(self._settings, topic=topic_of(instance_id))
        if made.listens:
            made = replace(made, endpoint=endpoint_of_rank(made.endpoint, number))
        if made.replay_endpoint is not None:
            made = replace(made, replay_endpoint=endpoint_of_rank(made.replay_endpoint, number))
        if instance_id in known:
            again = replace(
                made,
                bind=made.listens,
                endpoint=self._kept[instance_id],
                replay_endpoint=self._kept_replays.get(instance_id),
            )
            try:
                return KvEventsPublisher(again)
            except PortTakenError as error:
                _log.warning("%s publishes at another endpoint: %s", instance_id, error)
        return KvEventsPublisher(made)

    def _keep(self, instance_id: InstanceId, publisher: KvEventsPublisher) -> None:
        self._kept[instance_id] = publisher.endpoint
        if publisher.replay_endpoint is not None:
            self._kept_replays[instance_id] = publisher.replay_endpoint
        try:
            self._record.write(KV_EVENTS, self._kept)
            self._record.write(KV_REPLAYS, self._kept_replays)
        except KvferryError as error:
            _log.warning("the endpoint of %s is not remembered: %s", instance_id, error)

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
