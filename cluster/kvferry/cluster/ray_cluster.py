"""Starting or joining a Ray cluster, and leaving nothing of ours behind."""

import logging
import signal
import threading
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
LOOPBACK = "127.0.0.1"


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
            _node_ip_address=LOOPBACK,
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


def reserve_bundle(resources: dict[str, float], *, who: str, timeout_s: float) -> PlacementGroup:
    """Return a placement group of one bundle, or say why there is none.

    Raises:
        ResourcesError: naming what was asked, what the cluster has, and Ray's state of the group.
    """
    group: PlacementGroup = placement_group([resources], strategy="STRICT_PACK", name=who)
    if group.wait(timeout_s):
        return group
    state = placement_group_table(group)["stats"]["scheduling_state"]
    remove_placement_group(group)
    raise ResourcesError(
        f"{who} could not be placed within {timeout_s:g} s ({state})",
        given=resources,
        allowed={
            "total": _shown(ray_api.cluster_resources()),
            "free": _shown(ray_api.available_resources()),
        },
    )


def _shown(resources: dict[str, float]) -> str:
    names = [name for name in sorted(resources) if ":" not in name]
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"
