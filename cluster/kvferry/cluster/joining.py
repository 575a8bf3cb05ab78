"""Being connected to the Ray cluster that a service of nodes is in."""

import contextlib
import sys
from collections.abc import Iterator

from kvferry.cluster import local_cluster, ray_environment
from kvferry.cluster.naming import SERVICES_NAMESPACE
from kvferry.proto.errors import NotFoundError


@contextlib.contextmanager
def joined(ray_address: str, service: str) -> Iterator[None]:
    """Be connected inside; import what imports Ray there too. stdout is left to results.

    Args:
        ray_address: `auto`, host:port, or `local` for the cluster that was started for the service.
        service: its name.

    Raises:
        NotFoundError: none was started for it, or it has ended.
        UnavailableError: no cluster answers at the address.
    """
    address = ray_address
    if ray_address == "local":
        cluster = local_cluster.find(service)
        if cluster is None:
            raise NotFoundError(
                "no local Ray cluster runs for this service",
                given=service,
                allowed="kvferry up --ray-address local",
            )
        cluster.enter_environment()
        address = cluster.address
    else:
        ray_environment.prepare(ray_address)
    # Only now what imports Ray, and takes seconds to import.
    from kvferry.cluster import ray_cluster

    # Ray tells of dead workers on stdout, which belongs to the results.
    with (
        contextlib.redirect_stdout(sys.stderr),
        ray_cluster.connected(address, num_ranks=0, namespace=SERVICES_NAMESPACE),
    ):
        yield
