"""Services of nodes in a Ray cluster: starting, finding and removing them.

Their actors are detached: they outlive the driver that made them, and are found by their names.
The caller is connected to the cluster, in `naming.SERVICES_NAMESPACE`.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.cluster import naming, ray_cluster, ray_environment
from kvferry.cluster.config import require_reachable_bind
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.progress import Progress
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_handles import end_actors, get
from kvferry.cluster.ray_record import RayRecord
from kvferry.cluster.ray_store_node import RayStoreNode
from kvferry.cluster.signals import interrupts_held
from kvferry.cluster.up_config import (
    CoordinatorConfig,
    NodePlace,
    Removed,
    ServicePlaces,
    UpConfig,
    require_same,
)
from kvferry.proto.errors import (
    BusyError,
    DeadlineError,
    KvferryError,
    NotFoundError,
    UnavailableError,
)
from kvferry.proto.messages import Describe, Description
from kvferry.proto.scheme import require_equal_schemes

ray_api: Any = ray  # parts of Ray's interface are not typed
ANSWER_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 30.0
GONE_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The living actors of a service; `nodes` by host."""

    coordinator: ActorHandle[Any] | None
    nodes: dict[str, ActorHandle[Any]]

    def __bool__(self) -> bool:
        return self.coordinator is not None or bool(self.nodes)


def up(config: UpConfig, progress: Progress) -> ServicePlaces:
    """Start a service, or what is missing of it; return when all of it serves.

    If that fails, what this call has started is gone again.

    Raises:
        MismatchError: it runs with other settings; naming those that differ.
        UnavailableError: its coordinator is gone.
        ConfigError: the servers would listen where other hosts cannot reach them.
        PortTakenError: another process listens on a front's port.
        BusyError: somebody else is starting it now.
        DeadlineError: not ready within the start timeout.
    """
    deadline = time.monotonic() + config.start_timeout_s
    node_ids = _node_ids()
    require_reachable_bind(config.bind, frozenset(node_ids))
    found = _find(config.name)
    with _made(config) as make:
        coordinator = found.coordinator
        if coordinator is not None:
            _require_same(config, found, coordinator)
        elif found.nodes:
            raise UnavailableError(
                f"the coordinator of service {config.name} is gone",
                given=sorted(found.nodes),
                allowed="kvferry down, then kvferry up",
            )
        else:
            progress("starting the coordinator")
            coordinator = _new_coordinator(config, make)
        fronts: FrontAddresses = _ask(coordinator.start.remote(), "the coordinator")
        address = fronts.control
        missing = {host: node_id for host, node_id in node_ids.items() if host not in found.nodes}
        if missing:
            progress(f"starting a node on {len(missing)} hosts: {', '.join(missing)}")
        started = _start_nodes(config, address, missing, make, deadline)
    nodes = {**found.nodes, **started}
    return ServicePlaces(
        name=config.name,
        coordinator=address,
        nodes=tuple(
            NodePlace(
                node_id=node_ids.get(host, ""),
                host=host,
                address=_ask(node.front_address.remote(), f"the node at {host}"),
            )
            for host, node in sorted(nodes.items())
        ),
        was_running=not missing,
    )


def down(name: str) -> Removed:
    """Remove a service, all of it, and return when it is gone; one that is not there is fine.

    Raises:
        DeadlineError: something of it does not go.
        UnavailableError: the cluster does not answer; its record may be left.
    """
    found = _find(name)
    with interrupts_held():
        end_actors(list(found.nodes.values()), STOP_TIMEOUT_S)
        end_actors([found.coordinator] if found.coordinator is not None else [], STOP_TIMEOUT_S)
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while _find(name):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"service {name} is not gone yet", given=f"{GONE_TIMEOUT_S:g} s"
                )
            time.sleep(GONE_POLL_S)
        RayRecord(name).delete()
    return Removed(
        name=name, coordinator=found.coordinator is not None, hosts=tuple(sorted(found.nodes))
    )


def any_front(name: str) -> str:
    """Return the address of one of a service's nodes.

    Raises:
        NotFoundError: no such service here.
        KvferryError: no node answers.
    """
    failure: KvferryError = NotFoundError(
        "no such service in this Ray cluster", given=name, allowed="kvferry up"
    )
    for host, node in _find(name).nodes.items():
        try:
            return str(_ask(node.front_address.remote(), f"the node at {host}"))
        except KvferryError as error:
            failure = error
    raise failure


def resolve_service(name: str = naming.DEFAULT_SERVICE) -> str:
    """Return the address of a service's node on this host: for engines that run inside Ray.

    The process need not be connected to Ray, if the cluster of this host can be found
    (`RAY_ADDRESS`, or the one that was started here last).

    Raises:
        NotFoundError: the service has no node on this host.
        UnavailableError: there is no Ray cluster, or the node does not answer.
    """
    if ray_api.is_initialized():
        return _front_here(name)
    with ray_cluster.connected("auto", num_ranks=0, namespace=naming.SERVICES_NAMESPACE):
        return _front_here(name)


def _front_here(name: str) -> str:
    host = ray_cluster.node_host()
    node = _actor(naming.node_name(name, host))
    if node is None:
        raise NotFoundError(
            f"service {name} has no node on this host",
            given=host,
            allowed="kvferry up",
        )
    return str(_ask(node.front_address.remote(), f"the node at {host}"))


# -------------------------------------------------------------------------------------------------


class _Make:
    """Makes detached actors, and remembers which."""

    def __init__(self, config: UpConfig) -> None:
        self.names: list[str] = []
        self._options = {
            "namespace": naming.SERVICES_NAMESPACE,
            "lifetime": "detached",
            **OPTIONS,
            "runtime_env": ray_environment.of_actor(
                hash_seed=config.hash_seed, threads=1, credentials=config.credentials
            ),
        }

    def __call__(
        self, kind: type[Any], arguments: Mapping[str, Any], *, name: str, **options: Any
    ) -> ActorHandle[Any]:
        self.names.append(name)
        try:
            actor: ActorHandle[Any] = (
                ray_api.remote(kind)
                .options(name=name, **self._options, **options)
                .remote(**arguments)
            )
        except ActorAlreadyExistsError:
            self.names.remove(name)
            raise BusyError("somebody else is starting this service", given=name) from None
        return actor


@contextlib.contextmanager
def _made(config: UpConfig) -> Iterator[_Make]:
    """Lend what makes actors; unless all goes well, those that were made are killed."""
    make = _Make(config)
    try:
        yield make
    except BaseException:
        with interrupts_held():
            for name in make.names:
                actor = _actor(name)
                if actor is not None:
                    ray.kill(actor)
        raise


def _new_coordinator(config: UpConfig, make: _Make) -> ActorHandle[Any]:
    actor = make(
        RayCoordinatorActor,
        {
            "service_id": config.name,
            "fronts": FrontSettings(
                bind=config.bind, insecure=config.insecure, credentials=config.credentials
            ),
            "scheme": config.scheme,
            "warm_share": config.warm_share,
        },
        name=naming.coordinator_name(config.name),
    )
    starting: Any = actor.start.remote()
    get(starting, timeout_s=config.start_timeout_s, who="the coordinator")
    return actor


def _start_nodes(
    config: UpConfig,
    coordinator: str,
    node_ids: Mapping[str, str],
    make: _Make,
    deadline: float,
) -> dict[str, ActorHandle[Any]]:
    nodes = {
        host: make(
            RayStoreNode,
            {
                "config": config.node(host, coordinator=coordinator),
                "service_id": config.name,
            },
            name=naming.node_name(config.name, host),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        for host, node_id in node_ids.items()
    }
    starting: dict[str, Any] = {host: node.start.remote() for host, node in nodes.items()}
    for host, ref in starting.items():
        left_s = max(deadline - time.monotonic(), 0.1)
        get(ref, timeout_s=left_s, who=f"the node at {host}")
    return nodes


def _require_same(config: UpConfig, found: _Found, coordinator: ActorHandle[Any]) -> None:
    runs: CoordinatorConfig = _ask(coordinator.settings.remote(), "the coordinator")
    require_same(runs, config.coordinator, service=config.name)
    description: Description = _ask(coordinator.call.remote(Describe()), "the coordinator")
    require_equal_schemes(description.scheme, config.scheme, who="the service that was asked for")
    for host, node in found.nodes.items():
        running = _ask(node.settings.remote(), f"the node at {host}")
        asked = config.node(host, coordinator=running.coordinator)
        require_same(running, asked, service=config.name)


def _node_ids() -> dict[str, str]:
    """Return Ray's id of one live node on each host."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray_api.nodes() if node["Alive"]}


def _find(name: str) -> _Found:
    hosts = {
        naming.host_of_node(name, actor_name): actor_name
        for actor_name in ray_api.util.list_named_actors()
    }
    nodes = {host: _actor(actor_name) for host, actor_name in hosts.items() if host is not None}
    return _Found(
        coordinator=_actor(naming.coordinator_name(name)),
        nodes={host: node for host, node in nodes.items() if node is not None},
    )


def _actor(actor_name: str) -> ActorHandle[Any] | None:
    try:
        actor: ActorHandle[Any] = ray_api.get_actor(actor_name, namespace=naming.SERVICES_NAMESPACE)
    except ValueError:
        return None
    return actor


def _ask(ref: Any, who: str) -> Any:
    return get(ref, timeout_s=ANSWER_TIMEOUT_S, who=who)
