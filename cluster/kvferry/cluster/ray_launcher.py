"""Launching a service on Ray and taking it down again, whole.

Everything is owned by the driver: when the job ends, Ray takes actors and placement groups with
it. `RayService.close` does the same in good order.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle

from kvferry.cluster import naming, ray_cluster, ray_environment
from kvferry.cluster.config import ServiceConfig, require_reachable_bind
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.kv_events_publisher import PublisherSettings
from kvferry.cluster.progress import Progress
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_frozen import FrozenWatch
from kvferry.cluster.ray_handles import (
    RayAsyncCoordinator,
    end_actors,
    get,
)
from kvferry.cluster.ray_instance import RayInstance
from kvferry.cluster.ray_record import RayRecord, find_front
from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.rank import RankSettings
from kvferry.cluster.signals import interrupts_held
from kvferry.proto.errors import DeadlineError, KvferryError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import Identity
from kvferry.proto.ids import InstanceId
from kvferry.proto.listening import require_free
from kvferry.proto.messages import InstanceInfo, Role
from kvferry.proto.scheme import HashScheme
from kvferry.worker.device import gpus_per_process

log = logging.getLogger(__name__)

remote: Any = ray.remote  # its types do not know max_concurrency
COORDINATOR_START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 1.0
"""Time for the ranks, and then for the coordinator, to stop by themselves before they are killed.

Twice this and leaving Ray must fit into the 3 s that `ray job stop` gives.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One instance that serves: its handle to the router, and what it registered."""

    info: InstanceInfo
    link: EngineLink


class RayService:
    """A running service; a context manager that leaves nothing behind."""

    def __init__(self, config: ServiceConfig, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self._service_id = naming.new_service_id()
        self.scheme: HashScheme = make_scheme(
            seed=config.hash_seed,
            hash_block_tokens=config.hash_block_tokens,
            algorithm=config.algorithm,
            key_format=config.key_format,
        )
        self.control_address = ""
        self.metrics_address = ""
        self._coordinator: ActorHandle[Any] | None = None
        self._frozen: FrozenWatch | None = None
        self._places: dict[InstanceId, RayInstance] = {}
        self._launched: dict[InstanceId, Launched] = {}

    @property
    def instances(self) -> tuple[Launched, ...]:
        """All that were started, each in its present life."""
        return tuple(self._launched.values())

    @property
    def coordinator(self) -> RayAsyncCoordinator:
        """The coordinator for an event loop."""
        assert self._coordinator is not None
        return RayAsyncCoordinator(self._coordinator)

    def __enter__(self) -> "RayService":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop engines, then the coordinator, and give all resources back. Repeatable."""
        with interrupts_held():
            if self._frozen is not None:
                self._frozen.stop()
            ranks = [place.rank_0 for place in self._places.values()]
            end_actors([rank for rank in ranks if rank is not None], STOP_TIMEOUT_S)
            if self._coordinator is not None:
                end_actors([self._coordinator], STOP_TIMEOUT_S)
                with contextlib.suppress(KvferryError):  # then the cluster is gone, and it too
                    RayRecord(self._service_id).delete()
            for place in self._places.values():
                place.remove_place()
        self._places, self._coordinator = {}, None

    # ---------------------------------------------------------------------------------------------

    def start(self, progress: Progress) -> None:
        """Start everything, or raise and leave nothing (the caller closes).

        Raises:
            ResourcesError: the cluster cannot place an instance.
            ConfigError: the servers would listen where other nodes cannot reach them.
            PortTakenError, ModelError, MismatchError, ConfigError: as the actors raised them.
            DeadlineError: not ready within the start timeout.
        """
        deadline = time.monotonic() + self.config.start_timeout_s
        require_reachable_bind(self.config.bind, ray_cluster.node_hosts())
        progress("starting the coordinator")
        self._start_coordinator()
        roles: list[tuple[Role, int]] = [("prefill", i) for i in range(self.config.num_prefill)]
        roles += [("decode", i) for i in range(self.config.num_decode)]
        share = ray_cluster.cpu_share(self.config.num_ranks)
        for role, index in roles:
            instance = self._instance(role, index, share)
            self._places[instance.instance_id] = instance
            instance.place(max(deadline - time.monotonic(), 0.1))
        progress(
            f"starting {len(roles)} instances of {self.config.num_ranks} ranks: "
            "loading the model in each"
        )
        coordinator = self._coordinator_client(self.control_address)
        starting = {place.begin(coordinator): i for i, place in self._places.items()}
        self._all_started(starting, deadline)

    def start_again(self, instance_id: InstanceId, given_up: threading.Event) -> EngineLink:
        """Start the next life of an instance that is dead, or nearly so; see `StartAgain`.

        Raises:
            KvferryError: as `RayInstance.start_again`.
        """
        # The coordinator may have come back elsewhere than where the service began.
        coordinator = self._coordinator_client(find_front(self._service_id)())
        info = self._places[instance_id].start_again(coordinator, given_up)
        self._launched[instance_id] = launched = self._launch(info)
        return launched.link

    def leave(self, instance_id: InstanceId) -> bool:
        """End a drained instance and give its place back; see `Leave`."""
        self._launched.pop(instance_id, None)
        return self._places[instance_id].leave()

    def _coordinator_client(self, address: str) -> CoordinatorClient:
        return CoordinatorClient(address, self.config.credentials, find_front(self._service_id))

    def _start_coordinator(self) -> None:
        config = self.config
        self._coordinator = (
            remote(**OPTIONS)(RayCoordinatorActor)
            .options(
                name=naming.coordinator_name(self._service_id), runtime_env=self._environment(1)
            )
            .remote(
                service_id=self._service_id,
                fronts=FrontSettings(
                    bind=config.bind,
                    port=config.port,
                    insecure=config.insecure,
                    credentials=config.credentials,
                    reflection=config.reflection,
                    metrics_port=config.metrics_port,
                    kv_events=self._kv_events(),
                    hash_form="uint64" if config.kv_events is None else config.kv_events.hash_form,
                ),
                scheme=self.scheme,
                expected_identity=self.identity,
                sample_block_every=config.sample_block_every,
            )
        )
        addresses: FrontAddresses = get(
            self._coordinator.start.remote(),
            timeout_s=COORDINATOR_START_TIMEOUT_S,
            who="the coordinator",
        )
        name = naming.coordinator_name(self._service_id)
        self._frozen = FrozenWatch(lambda: [name], have_started=True)
        self.control_address = addresses.control
        self.metrics_address = addresses.metrics or ""

    def _kv_events(self) -> PublisherSettings | None:
        events = self.config.kv_events
        if events is None:
            return None
        return PublisherSettings(
            endpoint=events.endpoint,
            replay_endpoint=events.replay_endpoint,
            bind=events.bind,
            insecure=self.config.insecure,
            encoding=events.encoding,
            buffer_batches=events.buffer_batches,
        )

    def _instance(self, role: Role, index: int, share: float) -> RayInstance:
        config = self.config
        threads = max(1, (os.cpu_count() or 1) // config.num_ranks)
        return RayInstance(
            service_id=self._service_id,
            settings=self._rank_settings(role, InstanceId(f"{role}-{index}")),
            cpus=share,
            gpus=gpus_per_process(config.device),
            environment=self._environment(threads),
            start_timeout_s=config.start_timeout_s,
        )

    def _rank_settings(self, role: Role, instance_id: InstanceId) -> RankSettings:
        config = self.config
        return RankSettings(
            instance_id=instance_id,
            role=role,
            model=config.model,
            dtype=config.dtype,
            device=config.device,
            layout=config.layouts[role],
            hash_block_tokens=config.hash_block_tokens,
            kv_size=config.kv_size,
            max_model_len=config.max_model_len,
            token_budget=config.token_budget,
            max_running=config.max_running,
            policy=config.policy,
            algorithm=config.algorithm,
            key_format=config.key_format,
            bind=config.bind,
            insecure=config.insecure,
            serves_metrics=config.metrics_port is not None,
            credentials=config.credentials,
            reflection=config.reflection,
            rank_timeout_s=config.rank_timeout_s,
            hangs_after_s=config.hangs_after_s,
        )

    def _environment(self, threads: int) -> dict[str, dict[str, str]]:
        return ray_environment.of_actor(
            hash_seed=self.config.hash_seed,
            threads=threads,
            credentials=self.config.credentials,
        )

    def _all_started(self, starting: dict[Any, InstanceId], deadline: float) -> None:
        """Wait for all instances, or raise with the first that fails, whichever it is."""
        infos: dict[InstanceId, InstanceInfo] = {}
        left: list[Any] = list(starting)
        while left:
            done, left = ray.wait(left, timeout=max(deadline - time.monotonic(), 0.1))
            if not done:
                raise DeadlineError(
                    "not all instances were ready in time",
                    given=sorted(starting[ref] for ref in left),
                    allowed=f"{self.config.start_timeout_s:g} s",
                )
            for ref in done:
                instance_id = starting[ref]
                infos[instance_id] = get(
                    ref, timeout_s=STOP_TIMEOUT_S, who=f"instance {instance_id}"
                )
        self._launched = {i: self._launch(infos[i]) for i in self._places}

    def _launch(self, info: InstanceInfo) -> Launched:
        return Launched(info=info, link=self._places[info.instance_id].link(info))


@contextlib.contextmanager
def running_service(
    config: ServiceConfig, identity: Identity, progress: Progress
) -> Iterator[RayService]:
    """Yield a started `RayService` on the cluster that the config names; leave nothing behind.

    Raises:
        KvferryError: see `RayService.start` and `ray_cluster.connected`.
    """
    local = config.ray_address == "local"
    if local:
        require_free(config.bind, config.port)
        require_free(config.bind, config.metrics_port or 0)
    progress("starting a local Ray cluster" if local else f"joining Ray at {config.ray_address}")
    with (
        ray_cluster.connected(
            config.ray_address, num_ranks=config.num_ranks, namespace=naming.new_namespace()
        ),
        RayService(config, identity) as service,
    ):
        try:
            service.start(progress)
            yield service
        finally:
            progress("stopping")
