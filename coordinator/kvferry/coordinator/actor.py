"""The shell around the service: a lock, a clock, a log, and a thread that lets time pass.

A plain class: Ray wraps it elsewhere, tests run it as it is.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import UnavailableError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Command, Effect, Reply, Tick
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


StartFront = Callable[[Callable[[Command], Reply]], Front]
"""Starts serving the given call function and returns what stops it."""


class CoordinatorActor:
    """One coordinator process. The constructor keeps its arguments and cannot fail.

    Args:
        scheme, epoch, expected_identity, lease_cap_s, step_lease_s, check_invariants: as
            `CoordinatorService`.
        tick_interval_s: how often deadlines are looked at when no command comes.

    """

    def __init__(
        self,
        *,
        scheme: HashScheme,
        epoch: Epoch,
        expected_identity: Identity | None = None,
        lease_cap_s: float = 300.0,
        step_lease_s: float = 60.0,
        check_invariants: bool = False,
        tick_interval_s: float = 0.5,
    ) -> None:
        self._epoch = epoch
        self._settings: dict[str, Any] = {
            "scheme": scheme,
            "epoch": epoch,
            "expected_identity": expected_identity,
            "lease_cap_s": lease_cap_s,
            "step_lease_s": step_lease_s,
            "check_invariants": check_invariants,
        }
        self._tick_interval_s = tick_interval_s
        self._lock = threading.Lock()
        self._service: CoordinatorService | None = None
        self._front: Front | None = None
        self._ticker: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, front: StartFront | None = None) -> Epoch:
        """Begin to answer, through `front` as well if given, and return the epoch.

        A repeat while running changes nothing.

        Raises:
            BadInputError: a setting is wrong.
            UnavailableError: it was stopped before.
            KvferryError: as `front` raises; the coordinator is stopped then.

        """
        with self._lock:
            if self._stopping.is_set():
                raise UnavailableError("the coordinator was stopped")
            if self._service is not None:
                return self._epoch
            self._service = CoordinatorService(**self._settings)
        self._ticker = threading.Thread(target=self._tick, name="coordinator-tick", daemon=True)
        self._ticker.start()
        if front is not None:
            try:
                self._front = front(self.call)
            except BaseException:
                self.stop()
                raise
        return self._epoch

    def call(self, command: Command) -> Reply:
        """Execute one command.

        Raises:
            KvferryError: as `CoordinatorService.handle`.
            UnavailableError: not started yet, or stopped.

        """
        with self._lock:
            service = self._service
            if service is None:
                raise UnavailableError("the coordinator is not running")
            reply, effects = service.handle(command, time.monotonic())
        _log(effects)
        return reply

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
