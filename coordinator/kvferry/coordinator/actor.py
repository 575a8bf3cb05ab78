"""The shell around the service: a lock, a clock, a log, and a thread that lets time pass.

A plain class: Ray wraps it elsewhere, tests run it as it is.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvferry.coordinator.pool_events import PoolEvent
from kvferry.coordinator.registry import Memory, Registry
from kvferry.coordinator.service import CoordinatorService
from kvferry.coordinator.silence import DEAD_AFTER_S, SUSPECT_AFTER_S
from kvferry.proto.errors import UnavailableError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Epoch, InstanceId
from kvferry.proto.messages import (
    Command,
    Description,
    Effect,
    KvEventsPlace,
    RegisterInstance,
    Reply,
    ResetIdentity,
    Tick,
)
from kvferry.proto.scheme import HashScheme

logger = logging.getLogger(__name__)


class Front(Protocol):
    """A front that serves at `address` ("host:port") until it is stopped."""

    @property
    def address(self) -> str:
        """Where it serves."""
        ...

    def stop(self) -> None:
        """Stop serving; returns within the front's own grace period."""
        ...


class EventOutlet(Protocol):
    """Publishes what pools do, one stream per instance; every call returns at once."""

    def open(self, instance_id: InstanceId) -> None:
        """Be ready for an instance's events; repeating is fine.

        Raises:
            KvferryError: its events cannot be published where the settings say.

        """
        ...

    def publish(self, instance_id: InstanceId, events: Sequence[PoolEvent]) -> None:
        """Publish what the pool of an open instance did."""
        ...

    def place(self, instance_id: InstanceId) -> KvEventsPlace | None:
        """Return where the events of an open instance can be read, if anywhere."""
        ...

    def due_snapshots(self) -> list[InstanceId]:
        """Return once the instances of which readers have to be told everything."""
        ...

    def close(self) -> None:
        """Send what is queued and stop."""
        ...


StartFront = Callable[[Callable[[Command], Reply]], Front]
"""Starts serving the given call function and returns what stops it."""

StartOutlet = Callable[[], EventOutlet]
"""Makes an outlet, in the coordinator's process."""


class CoordinatorActor:
    """One coordinator process. The constructor keeps its arguments and cannot fail.

    Args:
        registry: what this life takes over from earlier ones, and leaves to later ones.
        scheme, expected_identity, lease_cap_s, step_lease_s, suspect_after_s, dead_after_s,
            warm_share, sample_block_every, check_invariants: as `CoordinatorService`.
        tick_interval_s: how often deadlines are looked at when no command comes.

    """

    def __init__(
        self,
        *,
        registry: Registry,
        scheme: HashScheme,
        expected_identity: Identity | None = None,
        lease_cap_s: float = 300.0,
        step_lease_s: float = 60.0,
        suspect_after_s: float = SUSPECT_AFTER_S,
        dead_after_s: float = DEAD_AFTER_S,
        warm_share: float = 0.0,
        sample_block_every: int | None = None,
        check_invariants: bool = False,
        tick_interval_s: float = 0.5,
    ) -> None:
        self._registry = registry
        self._make_service = partial(
            CoordinatorService,
            scheme=scheme,
            expected_identity=expected_identity,
            lease_cap_s=lease_cap_s,
            step_lease_s=step_lease_s,
            suspect_after_s=suspect_after_s,
            dead_after_s=dead_after_s,
            warm_share=warm_share,
            sample_block_every=sample_block_every,
            check_invariants=check_invariants,
        )
        self._tick_interval_s = tick_interval_s
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._service: CoordinatorService | None = None
        self._front: Front | None = None
        self._outlet: EventOutlet | None = None
        self._ticker: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, front: StartFront | None = None, outlet: StartOutlet | None = None) -> Epoch:
        """Begin to answer, through `front` as well if given, and return the epoch.

        With an `outlet` the KV events of all instances are published through it. A repeat while
        running changes nothing.

        Raises:
            BadInputError: a setting is wrong.
            UnavailableError: it was stopped before, or the registry does not answer.
            KvferryError: as `front` raises; the coordinator is stopped then.

        """
        with self._lock:
            if self._stopping.is_set():
                raise UnavailableError("the coordinator was stopped")
            if self._service is not None:
                return self._service.epoch
            memory = self._registry.begin()
            self._outlet = outlet() if outlet is not None else None
            self._service = self._make_service(
                epoch=memory.epoch,
                resets=memory.resets,
                tells_pool_events=self._outlet is not None,
            )
        self._ticker = threading.Thread(target=self._tick, name="coordinator-tick", daemon=True)
        self._ticker.start()
        if front is not None:
            try:
                self._front = front(self.call)
            except BaseException:
                self.stop()
                raise
        return memory.epoch

    def call(self, command: Command) -> Reply:
        """Execute one command.

        Raises:
            KvferryError: as `CoordinatorService.handle`, and for a reset as `Registry.save`.
            UnavailableError: not started yet, or stopped.

        """
        with self._lock:
            service = self._service
            if service is None:
                raise UnavailableError("the coordinator is not running")
            if self._outlet is None:
                reply, effects = service.handle(command, time.monotonic())
            else:
                reply, effects = self._handle_and_publish(service, self._outlet, command)
        _log(effects)
        if isinstance(command, ResetIdentity):
            self._save(service)
        return reply

    def _save(self, service: CoordinatorService) -> None:
        """Let what was reset be remembered; others are answered meanwhile."""
        with self._saving:
            with self._lock:
                memory = Memory(epoch=service.epoch, resets=service.resets())
            self._registry.save(memory)

    @staticmethod
    def _handle_and_publish(
        service: CoordinatorService, outlet: EventOutlet, command: Command
    ) -> tuple[Reply, tuple[Effect, ...]]:
        """Execute a command and publish what it did to the pools, under the lock: order counts."""
        if isinstance(command, RegisterInstance):
            # An endpoint that cannot be had refuses the instance before anything has changed.
            outlet.open(command.info.instance_id)
        reply, effects = service.handle(command, time.monotonic())
        for instance_id, events in service.take_pool_events():
            outlet.publish(instance_id, events)
        if isinstance(command, Tick):
            for instance_id in outlet.due_snapshots():
                outlet.publish(instance_id, service.pool_snapshot(instance_id))
        if isinstance(reply, Description):
            reply = replace(
                reply,
                instances=tuple(
                    replace(status, kv_events=outlet.place(status.info.instance_id))
                    for status in reply.instances
                ),
            )
        return reply, effects

    def front_address(self) -> str | None:
        """Return where the front listens, "host:port"; None without one."""
        return self._front.address if self._front is not None else None

    def stop(self) -> None:
        """Stop the front and the clock; later commands are refused."""
        self._stopping.set()
        if self._front is not None:
            self._front.stop()
            self._front = None
        if self._ticker is not None:
            self._ticker.join(timeout=2 * self._tick_interval_s + 1.0)
            self._ticker = None
        with self._lock:
            self._service = None
            outlet, self._outlet = self._outlet, None
        if outlet is not None:
            outlet.close()

    def _tick(self) -> None:
        while not self._stopping.wait(self._tick_interval_s):
            try:
                self.call(Tick())
            except Exception:
                # Time must go on: one failed sweep is reported and the next one is tried.
                logger.exception("a tick failed")


def _log(effects: tuple[Effect, ...]) -> None:
    for effect in effects:
        logger.info("%s: %s", effect.kind, effect.detail)
