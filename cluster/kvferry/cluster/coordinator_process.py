"""A coordinator with all its fronts, as a process of its own has it, in one of its lives.

It listens where the life before it did, as far as it can, so that whoever knew it finds it again.
One that wakes up after a later life has begun stops, so that nobody is left with it.
"""

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.cluster.kv_events_outlet import KvEventsOutlet
from kvferry.cluster.kv_events_publisher import PublisherSettings
from kvferry.cluster.metrics.coordinator_front import coordinator_front
from kvferry.cluster.metrics.metrics_server import MetricsServer
from kvferry.cluster.record import FRONTS, Record, RecordRegistry
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.proto.bind import reachable_address
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import KvferryError, PortTakenError, UnavailableError
from kvferry.proto.ids import Epoch
from kvferry.proto.kv_events import HashForm
from kvferry.proto.messages import Command, Reply

CHECK_LIFE_S = 1.0
"""How often a life looks whether a later one has begun."""

_S = TypeVar("_S")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Where a coordinator listens, and how.

    Ports of 0 are chosen once and kept. Without `metrics_port` there are no metrics, without
    `kv_events` no KV events; `hash_form` is how these tell hashes.
    """

    bind: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    credentials: Credentials | None = None
    reflection: bool = False
    metrics_port: int | None = None
    kv_events: PublisherSettings | None = None
    hash_form: HashForm = "uint64"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontAddresses:
    """Where other machines reach the fronts, `host:port`; `metrics` is None without metrics."""

    control: str
    metrics: str | None


class CoordinatorProcess:
    """Construct, `start`; then it serves until `stop`. Thread-safe.

    Args:
        record: outlives this process.
        fronts: where it listens.
        reach_host: the address by which others reach this machine.
        core: settings of `CoordinatorActor`.
    """

    def __init__(
        self,
        *,
        record: Record,
        fronts: FrontSettings,
        reach_host: Callable[[], str],
        **core: Any,
    ) -> None:
        self._record = record
        self._fronts = fronts
        self._reach_host = reach_host
        self._registry = RecordRegistry(record)
        self._make_core = functools.partial(CoordinatorActor, registry=self._registry, **core)
        self._lock = threading.Lock()
        self._core: CoordinatorActor | None = None
        self._metrics: MetricsServer | None = None
        self._addresses: FrontAddresses | None = None
        self._stopped = threading.Event()

    def start(self) -> FrontAddresses:
        """Serve, and return where; a repeat changes nothing. If it fails, nothing serves.

        Raises:
            KvferryError: as `CoordinatorActor.start`, `ControlServer` and `MetricsServer`.
            UnavailableError: it was stopped, or the record cannot be read or written.
        """
        with self._lock:
            if self._stopped.is_set():
                raise UnavailableError("the coordinator was stopped")
            if self._addresses is None:
                try:
                    self._addresses = self._start()
                except BaseException:
                    self._end()
                    raise
            return self._addresses

    def call(self, command: Command) -> Reply:
        """Execute one command; errors as in `CoordinatorActor.call`."""
        core = self._core
        if core is None:
            raise UnavailableError("the coordinator is not running")
        return core.call(command)

    def stop(self) -> None:
        """Stop everything; repeating is fine."""
        with self._lock:
            self._stopped.set()
            self._end()

    def _start(self) -> FrontAddresses:
        settings, kept = self._fronts, self._record.read(FRONTS)

        def control(call: Callable[[Command], Reply]) -> ControlServer:
            serve = functools.partial(
                ControlServer,
                call,
                bind=settings.bind,
                insecure=settings.insecure,
                credentials=settings.credentials,
                reflection=settings.reflection,
            )
            return listen_again(lambda port: serve(port=port), settings.port, kept.get("control"))

        self._core = core = self._make_core()
        epoch = core.start(control, None if settings.kv_events is None else self._outlet)
        if settings.metrics_port is not None:
            serve = functools.partial(
                coordinator_front, self.call, bind=settings.bind, insecure=settings.insecure
            )
            self._metrics = listen_again(
                lambda port: serve(port=port), settings.metrics_port, kept.get("metrics")
            )
        addresses = FrontAddresses(
            control=self._reachable(str(core.front_address())),
            metrics=None if self._metrics is None else self._reachable(self._metrics.address),
        )
        self._record.write(FRONTS, {"control": addresses.control, "metrics": addresses.metrics})
        threading.Thread(
            target=self._stop_when_superseded, args=(epoch,), name="kvferry-life", daemon=True
        ).start()
        return addresses

    def _stop_when_superseded(self, epoch: Epoch) -> None:
        while not self._stopped.wait(CHECK_LIFE_S):
            try:
                last = self._registry.last()
            except KvferryError as error:
                _log.warning("nobody tells whether this is the last life: %s", error)
                continue
            if last > epoch:
                _log.error("life %d stops, since life %d has begun", epoch, last)
                self.stop()

    def _outlet(self) -> KvEventsOutlet:
        settings = self._fronts
        assert settings.kv_events is not None
        return KvEventsOutlet(
            settings.kv_events, settings.hash_form, self._reach_host, self._record
        )

    def _end(self) -> None:
        core, self._core = self._core, None
        metrics, self._metrics = self._metrics, None
        self._addresses = None
        if core is not None:
            core.stop()
        if metrics is not None:
            metrics.stop()

    def _reachable(self, address: str) -> str:
        return reachable_address(address, self._reach_host)


def listen_again(listen: Callable[[int], _S], port: int, kept: str | None) -> _S:
    """Listen on `port`, or, where that is 0, on the port of the `kept` address if it is free.

    Raises:
        KvferryError: as `listen`.
    """
    if port == 0 and kept is not None:
        try:
            return listen(int(kept.rpartition(":")[2]))
        except PortTakenError:
            pass  # better elsewhere than nowhere: the record tells where
    return listen(port)
