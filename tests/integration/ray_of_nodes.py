"""A Ray cluster of several nodes, which a test may kill or drain, and who runs where in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from kvferry.cluster import naming
from kvferry.cluster.ray_handles import get
from kvferry.cluster.ray_nodes import HEALTH

ray_api: Any = ray  # parts of Ray's interface are not typed
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextmanager
def ray_of_nodes(num_nodes: int, *, head_cpus: int = 1, **settings: Any) -> Iterator[Any]:
    """Connect to a cluster of a head and so many nodes, each made with these settings.

    Of a node that dies Ray hears within two seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = NODE | {
            "num_cpus": head_cpus,
            "include_dashboard": False,
            "_system_config": HEALTH,
        }
        running: Any = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(num_nodes):
                running.add_node(**NODE, **settings)
            ray_api.init(
                address=running.address, namespace=naming.new_namespace(), log_to_driver=False
            )
            yield running
        finally:
            ray_api.shutdown()
            running.shutdown()


def home_of(actor: Any) -> str:
    """The id of the Ray node that an actor runs on."""
    ask = actor.__ray_call__.remote(lambda _: ray_api.get_runtime_context().get_node_id())
    return str(get(ask, timeout_s=10.0, who="an actor"))
