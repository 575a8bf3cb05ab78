"""Starting or joining a Ray cluster, and leaving nothing of ours behind."""

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from kvferry.cluster.signals import handlers_kept, interrupts_held
from kvferry.proto.errors import BadInputError, ResourcesError, UnavailableError

log = logging.getLogger(__name__)

ray_api: Any = ray  # parts of Ray's interface are not typed
CONNECT_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; blocks never pass through it


@contextlib.contextmanager
def connected(address: str, *, num_ranks: int, namespace: str) -> Iterator[None]:
    """Join a running Ray cluster, or run a local one inside for an address of `local`.

    A local cluster's files are removed with it, unless the body ended with an error that is
    kvferry's or Ray's: then they are kept for their logs, and the log says where.

    Raises:
        UnavailableError: no cluster answers at the address.
    """
    if address != "local":
        _join(address, namespace)
        try:
            yield
        finally:
            _disconnect()
        return
    folder = tempfile.mkdtemp(prefix="kvferry-ray-")
    try:
        _init(
            address="local",
            namespace=namespace,
            num_cpus=max(num_ranks, 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
        )
        yield
    except BadInputError:
        raise
    except Exception:
        log.warning("Ray's logs are kept in %s", folder)
        folder = ""
        raise
    finally:
        with interrupts_held():
            _disconnect()
            shutil.rmtree(folder, ignore_errors=True)


def _join(address: str, namespace: str) -> None:
    if address != "auto":
        _require_listener(address)
    try:
        _init(address=address, namespace=namespace)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UnavailableError(
            f"no Ray cluster answers: {error}", given=address, allowed="local, auto or host:port"
        ) from None


def _require_listener(address: str) -> None:
    # Ray itself would try for minutes, and cannot be interrupted meanwhile.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UnavailableError(
            f"nothing listens there: {error}", given=address, allowed="a Ray head's host:port"
        ) from None


def _init(**options: Any) -> None:
    # Ray puts a handler of its own on SIGTERM, which would leave without our clean-up.
    with handlers_kept():
        ray.init(
            log_to_driver=False, configure_logging=True, logging_level=logging.ERROR, **options
        )


def _disconnect() -> None:
    # Ray takes the process's own handler of SIGTERM with it.
    with handlers_kept():
        ray.shutdown()


def cpu_share(num_ranks: int) -> float:
    """Return the CPUs that each rank asks for: one, or an equal share of a smaller cluster."""
    cpus = float(ray_api.cluster_resources().get("CPU", 0.0))
    return max(min(1.0, int(cpus / num_ranks * 100) / 100), 0.01)


def node_host() -> str:
    """Return the address by which other nodes reach this one."""
    host: str = ray_api.util.get_node_ip_address()
    return host


def node_id() -> str:
    """Return Ray's id of this node."""
    found: str = ray_api.get_runtime_context().get_node_id()
    return found


def node_hosts() -> frozenset[str]:
    """Return the addresses of the cluster's live nodes."""
    return frozenset(node["NodeManagerAddress"] for node in ray_api.nodes() if node["Alive"])


def reserve_bundles(
    bundles: list[dict[str, float]], *, name: str, who: str, timeout_s: float
) -> PlacementGroup:
    """Return a placement group of equal bundles, as close together as can be, or say why not.

    Raises:
        ResourcesError: naming what was asked, what the cluster has, and Ray's state of the group.
    """
    group: PlacementGroup = placement_group(bundles, strategy="PACK", name=name)
    if group.wait(timeout_s):
        return group
    error = not_placed(group, who, timeout_s)
    remove_placement_group(group)
    raise error


def not_placed(group: PlacementGroup, who: str, timeout_s: float) -> ResourcesError:
    """Return the error that says why a group of equal bundles has no place."""
    bundles = group.bundle_specs
    resources = bundles[0]
    state = placement_group_table(group)["stats"]["scheduling_state"]
    return ResourcesError(
        f"{who} could not be placed within {timeout_s:.1f} s ({state})",
        given={"ranks": len(bundles), "each": _amounts(resources, resources)},
        allowed={
            "total": _amounts(ray_api.cluster_resources(), resources),
            "free": _amounts(ray_api.available_resources(), resources),
        },
    )


def _amounts(resources: dict[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in sorted(names))
