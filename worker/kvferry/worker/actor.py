"""A store instance's rank: a worker without a model. A plain class that Ray can run as an actor."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Epoch, Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Heard, InstanceInfo
from kvferry.worker.coordinator_reserver import Call, CoordinatorReserver
from kvferry.worker.device import open_device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.returning import come_back
from kvferry.worker.service import WorkerService
from kvferry.worker.stats import WorkerStats
from kvferry.worker.store_moves import StoreMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """What a store instance holds and where it listens.

    `num_blocks` includes the null block. `bind` is the address peers connect to; beyond loopback it
    needs `credentials` that tell clients apart, or `insecure`. `reflection` tells clients of the
    services and messages.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    identity: Identity
    num_blocks: int
    block_tokens: int
    device: str = "cpu"
    bind: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    credentials: Credentials | None = None
    reflection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStarted:
    """What the instance's registration says about this process."""

    address: str
    pid: int


class WorkerActor:
    """Construct, `start`, register elsewhere, `set_coordinator`; then it serves and takes stores.

    Every method may be called from any thread of the actor, one at a time.
    """

    # A Ray actor whose constructor fails is hard to tell from one that died: nothing happens here.
    def __init__(self) -> None:
        self._config: StoreConfig | None = None
        self._service: WorkerService | None = None
        self._reserver: CoordinatorReserver | None = None
        self._moves: StoreMoves | None = None
        self._num_returns = 0

    def start(self, config: StoreConfig) -> StoreStarted:
        """Allocate the memory, start the transfer server, and return how to reach it.

        Raises:
            ConfigError: sizes, dtype or device that cannot be, or it was started before.
            InsecureBindError, PortTakenError: the server cannot listen there.
        """
        if self._service is not None:
            raise ConfigError("this worker was started before", given=config.instance_id)
        memory = KvMemory(
            open_device(config.device),
            config.identity,
            num_blocks=config.num_blocks,
            layout=Layout(block_tokens=config.block_tokens),
        )
        service = WorkerService(
            incarnation=config.incarnation, memory=memory, credentials=config.credentials
        )
        address = service.serve(
            bind=config.bind,
            port=config.port,
            insecure=config.insecure,
            reflection=config.reflection,
        )
        self._config, self._service = config, service
        return StoreStarted(address=address, pid=os.getpid())

    def set_coordinator(
        self, call: Call, epoch: Epoch, beat_soon: Callable[[], None] = lambda: None
    ) -> None:
        """Take stores from now on, with blocks reserved through `call` under `epoch`.

        `beat_soon` is called when there may be something to hear: the store has to come back, and
        takes none until `come_back` has succeeded, or a move has ended.

        Raises:
            ConfigError: the worker was not started.
        """
        service = self._started()
        assert self._config is not None
        service.reserver = self._reserver = CoordinatorReserver(
            call,
            instance_id=self._config.instance_id,
            incarnation=self._config.incarnation,
            epoch=epoch,
            on_lost=beat_soon,
        )
        self._moves = StoreMoves(service, self._reserver, beat_soon)

    def beat(self, call: Call) -> Heard:
        """Tell the coordinator that the instance lives; as `CoordinatorReserver.beat`.

        What it is to move is begun.

        Raises:
            ConfigError: the worker has no coordinator.
        """
        heard = self._member().beat(call)
        if self._moves is not None:
            self._moves.begin(heard.moves)
        return heard

    def come_back(self, call: Call, info: InstanceInfo) -> int:
        """Register again with all that is held; errors and value as `returning.come_back`.

        Raises:
            ConfigError: the worker has no coordinator.
        """
        service, reserver = self._started(), self._member()
        self._num_returns += 1
        return come_back(
            call,
            info,
            self._num_returns,
            reserver=reserver,
            residency=service.residency,
        )

    def stats(self) -> WorkerStats:
        """Return what was moved and refused so far.

        Raises:
            ConfigError: the worker was not started.
        """
        return self._started().stats()

    def stop(self) -> None:
        """Stop serving; repeating, or without a start, is fine."""
        if self._moves is not None:
            self._moves.stop()
        if self._service is not None:
            self._service.stop()
            self._service = None

    def _started(self) -> WorkerService:
        if self._service is None:
            raise ConfigError("the worker was not started", allowed="start(config) first")
        return self._service

    def _member(self) -> CoordinatorReserver:
        if self._reserver is None:
            raise ConfigError("this worker has no coordinator", allowed="set_coordinator first")
        return self._reserver
