"""One node: a front for the engines of its host, and a store for each identity they attach with.

A plain class: Ray wraps it elsewhere, tests run it as it is.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from kvferry.cluster.attached_store import AttachedStore
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.engine_info import AttachedEngine, EngineInfo
from kvferry.cluster.engine_roll import EngineRoll
from kvferry.cluster.moving_address import FindAddress, MovingAddress
from kvferry.cluster.naming import outside_ray
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.node_server import NodeServer
from kvferry.cluster.serving.pulse import BEAT_TIMEOUT_S
from kvferry.cluster.store_watch import StoreWatch
from kvferry.proto.bind import reachable_address
from kvferry.proto.errors import (
    DeadlineError,
    DrainedError,
    KvferryError,
    ResourcesError,
    UnavailableError,
)
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import (
    Describe,
    Description,
    Heard,
    InstanceInfo,
    Registered,
    RegisterInstance,
    RemoveInstance,
    expect,
)
from kvferry.proto.scheme import HashScheme
from kvferry.worker.actor import StoreConfig, WorkerActor

CALL_TIMEOUT_S = 10.0
STOP_CALL_TIMEOUT_S = 1.0
MIN_BLOCKS = 8
"""Fewest blocks of a store, the null block included; with fewer it would be of no use."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Store:
    worker: WorkerActor
    info: InstanceInfo
    coordinator: CoordinatorClient
    detach: Callable[[Identity], None]

    def beat(self) -> Heard:
        """See `WatchedStore.beat`."""
        return self.worker.beat(partial(self.coordinator.call, timeout_s=BEAT_TIMEOUT_S))

    def come_back(self) -> None:
        """See `WatchedStore.come_back`; one that was drained is detached instead."""
        call = partial(self.coordinator.call, timeout_s=CALL_TIMEOUT_S)
        try:
            num_blocks = self.worker.come_back(call, self.info)
        except DrainedError as error:
            _log.warning("%s is closed: %s", self.info.instance_id, error)
            self.detach(self.info.identity)
            return
        _log.info("%s has come back with %d blocks", self.info.instance_id, num_blocks)

    @property
    def attached(self) -> AttachedStore:
        return AttachedStore(
            instance_id=self.info.instance_id,
            incarnation=self.info.incarnation,
            transfer_address=self.info.rank_addresses[0],
            num_blocks=self.info.num_blocks,
            hash_block_tokens=self.info.scheme.hash_block_tokens,
        )


class StoreNode:
    """Construct, `start`; then it serves until `stop`. Thread-safe.

    Args:
        config: what it is made of.
        find_coordinator: tells where the coordinator's front is; None: where the config says.
        node_id: returns Ray's id of this node.
    """

    # A Ray actor whose constructor fails is hard to tell from one that died: nothing happens here.
    def __init__(
        self,
        config: NodeConfig,
        find_coordinator: FindAddress | None = None,
        node_id: Callable[[], str] = outside_ray,
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._find_coordinator = find_coordinator
        self._coordinator = CoordinatorClient(
            config.coordinator, config.credentials, find_coordinator
        )
        # Held while a store is made: engines of one identity that start at once get one store.
        self._lock = threading.Lock()
        self._stores: dict[Identity, _Store] = {}
        self._roll = EngineRoll()
        self._scheme: HashScheme | None = None
        self._front: NodeServer | None = None
        self._watch: StoreWatch | None = None

    def start(self) -> str:
        """Serve, and return the front's address as other hosts reach it.

        Stores of an earlier life of this node are removed from the service.

        Raises:
            UnavailableError, DeadlineError: the coordinator does not answer.
            PortTakenError: another process listens on the port.
            ConfigError: this machine cannot listen there, or not with these credentials.
        """
        config = self._config
        description = self._describe()
        for status in description.instances:
            if self._is_ours(status.info.instance_id):
                self._remove(status.info, "its node has started anew", CALL_TIMEOUT_S)
        with self._lock:
            place = MovingAddress(config.coordinator, self._find_coordinator)
            self._front = NodeServer(self, config, place)
            self._watch = StoreWatch(lambda: list(self._stores.values()))
            self._scheme = description.scheme
        return self.front_address()

    def front_address(self) -> str:
        """Return where other hosts reach the front.

        Raises:
            UnavailableError: it does not serve.
        """
        if self._front is None:
            raise UnavailableError("this node does not serve", given=self._config.host)
        return self._reachable(self._front.address)

    def settings(self) -> NodeConfig:
        """Return what this node is made of."""
        return self._config

    def attach(
        self, identity: Identity, timeout_s: float, engine: EngineInfo | None = None
    ) -> AttachedStore:
        """Return the store of an identity; the first call for it makes and registers one.

        Args:
            identity: of the engine that asks.
            timeout_s: how long to wait while others' stores are made.
            engine: the engine itself, for the list of engines.

        Raises:
            ResourcesError: `max_models` other identities are attached, or `store_bytes` has no room
                for `MIN_BLOCKS` blocks of this one.
            ConfigError: an identity that no store can hold.
            UnavailableError: the node does not serve, or the coordinator does not answer.
            DeadlineError: not within the time.
        """
        with self._locked(timeout_s):
            if self._scheme is None:
                raise UnavailableError("this node does not serve", given=self._config.host)
            store = self._stores.get(identity)
            if store is None:
                store = self._new_store(identity, self._scheme)
                self._stores[identity] = store
            if engine is not None:
                self._roll.saw(engine, identity.digest(), time.monotonic())
            return store.attached

    def engines(self) -> tuple[AttachedEngine, ...]:
        """Return the engines that have attached lately.

        Raises:
            DeadlineError: a store that is being made takes too long.
        """
        with self._locked(CALL_TIMEOUT_S):
            return self._roll.engines(time.monotonic())

    def stop(self) -> None:
        """Stop serving, and take the stores out of the service; repeating is fine."""
        front, self._front = self._front, None
        if front is not None:
            front.stop()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        with self._lock:
            self._scheme = None
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            with contextlib.suppress(KvferryError):  # nobody asks a coordinator that is gone
                self._remove(store.info, "its node stops", STOP_CALL_TIMEOUT_S)
            store.worker.stop()
        self._coordinator.close()

    @contextlib.contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineError("other stores are being made here", given=f"{timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _new_store(self, identity: Identity, scheme: HashScheme) -> _Store:
        config = self._config
        self._require_place()
        store = StoreConfig(
            instance_id=InstanceId(f"store-{config.host}-{identity.digest().hex()[:8]}"),
            incarnation=Incarnation(time.time_ns()),
            identity=identity,
            num_blocks=self._num_blocks(identity, scheme.hash_block_tokens),
            block_tokens=scheme.hash_block_tokens,
            bind=config.bind,
            insecure=config.insecure,
            credentials=config.credentials,
        )
        worker = WorkerActor()
        try:
            started = worker.start(store)
            info = InstanceInfo(
                instance_id=store.instance_id,
                role="store",
                incarnation=store.incarnation,
                identity=identity,
                scheme=scheme,
                layout=Layout(block_tokens=store.block_tokens),
                num_blocks=store.num_blocks,
                rank_addresses=(self._reachable(started.address),),
                max_model_len=0,
                rank_pids=(started.pid,),
                rank_nodes=tuple(filter(None, [self._node_id()])),
                version=version("kvferry"),
            )
            self._register(worker, info)
        except BaseException:
            worker.stop()
            raise
        _log.info("%s holds %d blocks for %s", info.instance_id, info.num_blocks, identity.model)
        return _Store(worker=worker, info=info, coordinator=self._coordinator, detach=self._detach)

    def _detach(self, identity: Identity) -> None:
        with self._locked(CALL_TIMEOUT_S):
            store = self._stores.pop(identity, None)
        if store is not None:
            store.worker.stop()

    def _register(self, worker: WorkerActor, info: InstanceInfo) -> None:
        call = partial(self._coordinator.call, timeout_s=CALL_TIMEOUT_S)
        command = RegisterInstance(call_id=f"{info.instance_id}/{info.incarnation}", info=info)
        try:
            registered = expect(call(command), Registered)
        except (UnavailableError, DeadlineError):
            # It may have been registered all the same.
            with contextlib.suppress(KvferryError):
                self._remove(info, "its registration was not answered", STOP_CALL_TIMEOUT_S)
            raise
        watch = self._watch
        if watch is None:
            with contextlib.suppress(KvferryError):
                self._remove(info, "its node stops", STOP_CALL_TIMEOUT_S)
            raise UnavailableError("this node does not serve any more", given=self._config.host)
        worker.set_coordinator(call, registered.epoch, watch.look)

    def _require_place(self) -> None:
        config = self._config
        if len(self._stores) >= config.max_models:
            raise ResourcesError(
                "this node has as many stores as it may have",
                given=[
                    f"{store.info.instance_id} ({identity.model} {identity.weight_version})"
                    for identity, store in self._stores.items()
                ],
                allowed=f"{config.max_models} identities (--max-models)",
            )

    def _num_blocks(self, identity: Identity, hash_block_tokens: int) -> int:
        block_bytes = identity.block_bytes(hash_block_tokens)
        num_blocks = self._config.store_bytes // block_bytes
        if num_blocks < MIN_BLOCKS:
            raise ResourcesError(
                f"this node's stores have no room for {MIN_BLOCKS} blocks of {identity.model}",
                given={"store_bytes": self._config.store_bytes, "block_bytes": block_bytes},
                allowed=f"store_bytes >= {MIN_BLOCKS * block_bytes} (--store-gib)",
            )
        return num_blocks

    def _is_ours(self, instance_id: InstanceId) -> bool:
        return instance_id.rpartition("-")[0] == f"store-{self._config.host}"

    def _describe(self) -> Description:
        with contextlib.closing(self._control_client()) as client:
            return client.ask(Describe(), Description)

    def _control_client(self) -> ControlClient:
        config = self._config
        return ControlClient(
            config.coordinator, CALL_TIMEOUT_S, config.credentials, self._find_coordinator
        )

    def _remove(self, info: InstanceInfo, reason: str, timeout_s: float) -> None:
        command = RemoveInstance(
            call_id=f"{info.instance_id}/{info.incarnation}/remove",
            instance_id=info.instance_id,
            incarnation=info.incarnation,
            reason=reason,
        )
        self._coordinator.call(command, timeout_s=timeout_s)

    def _reachable(self, address: str) -> str:
        return reachable_address(address, lambda: self._config.host)
