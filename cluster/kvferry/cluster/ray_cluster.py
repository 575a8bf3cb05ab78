"""Starting or joining a Ray cluster, and leaving nothing of ours behind."""

import logging
import signal
import threading
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from kvferry.proto.errors import ResourcesError, UnavailableError

ray_api: Any = ray  # parts of Ray's interface are not typed
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; blocks never pass through it


def connect(address: str, *, num_ranks: int, namespace: str) -> None:
    """Start a local Ray cluster (`local`) or join a running one.

    Raises:
        UnavailableError: no cluster answers at the address.
    """
    if address == "local":
        _init(
            address="local",
            namespace=namespace,
            num_cpus=max(num_ranks, 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        return
    try:
        _init(address=address, namespace=namespace)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UnavailableError(
            f"no Ray cluster answers: {error}", given=address, allowed="local, auto or host:port"
        ) from None


def _init(**options: Any) -> None:
    # Ray puts a handler of its own on SIGTERM, which would leave without our clean-up.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, configure_logging=True, logging_level=logging.ERROR, **options)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)


def disconnect() -> None:
    """Leave the cluster; one that `connect` started is stopped."""
    ray.shutdown()


def cpu_share(num_ranks: int) -> float:
    """Return the CPUs that each rank asks for: one, or an equal share of a smaller cluster."""
    cpus = float(ray_api.cluster_resources().get("CPU", 0.0))
    return max(min(1.0, int(cpus / num_ranks * 100) / 100), 0.01)


def node_host() -> str:
    """Return the address by which other nodes reach this one."""
    host: str = ray_api.util.get_node_ip_address()
    return host


def node_hosts() -> frozenset[str]:
    """Return the addresses of the cluster's live nodes."""
    return frozenset(node["NodeManagerAddress"] for node in ray_api.nodes() if node["Alive"])


def reserve_bundle(
    resources: dict[str, float], *, name: str, who: str, timeout_s: float
) -> PlacementGroup:
    """Return a placement group of one bundle, or say why there is none.

    Raises:
        ResourcesError: naming what was asked, what the cluster has, and Ray's state of the group.
    """
    group: PlacementGroup = placement_group([resources], strategy="STRICT_PACK", name=name)
    if group.wait(timeout_s):
        return group
    state = placement_group_table(group)["stats"]["scheduling_state"]
    remove_placement_group(group)
    raise ResourcesError(
        f"{who} could not be placed within {timeout_s:.1f} s ({state})",
        given=_amounts(resources, resources),
        allowed={
            "total": _amounts(ray_api.cluster_resources(), resources),
            "free": _amounts(ray_api.available_resources(), resources),
        },
    )


def _amounts(resources: dict[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in sorted(names))
