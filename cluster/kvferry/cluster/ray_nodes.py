"""A Ray cluster of several nodes on this machine, whose nodes may be killed and replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import ray
from ray._common import utils
from ray.cluster_utils import Cluster

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.processes import Process
from kvferry.cluster.ray_cluster import OBJECT_STORE_BYTES
from kvferry.cluster.signals import handlers_kept, interrupts_held

ray_api: Any = ray  # parts of Ray's interface are not typed
ray_utils: Any = utils  # private, and not typed

# Of a node that dies or freezes Ray hears within two seconds instead of fifteen, or of a minute.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
_NODE: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES}


class _Cluster(Cluster):
    """A cluster whose nodes may be added by any thread, once there is a head.

    With this process the head ends by itself, whatever happens, and without a head the nodes do.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        # Ray writes the head's address there, and on a new machine there is no such folder.
        Path(ray_utils.get_default_ray_temp_dir()).mkdir(exist_ok=True)
        super().__init__(initialize_head=True, head_node_args=head)
        # Ray would set a handler of signals, and kill the node's processes with the thread.
        self._shutdown_at_exit = False


class RayNodes:
    """A head, which nobody kills, and nodes of one CPU, each with a name of its own.

    Args:
        folder: of all files of the cluster.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        head = _NODE | {
            "num_cpus": 0,
            "include_dashboard": False,
            "temp_dir": str(folder),
            "_system_config": HEALTH,
        }
        self._cluster: Any = _Cluster(head)
        self._nodes: dict[str, Any] = {}
        self._num_made = 0

    @property
    def address(self) -> str:
        """The head's host:port."""
        address: str = self._cluster.address
        return address

    def add(self) -> None:
        """Add a node and wait until the cluster knows it."""
        self._num_made += 1
        node = self._cluster.add_node(**_NODE, num_cpus=1, temp_dir=str(self._folder))
        self._nodes[f"node-{self._num_made}"] = node

    def raylets(self) -> dict[str, Process]:
        """Return the main process of each node that lives, by the node's name."""
        found = {name: processes.find(_raylet(node).pid) for name, node in self._nodes.items()}
        return {
            name: one
            for name, one in found.items()
            # Asking reaps it: to a node's workers one that is not reaped looks alive.
            if _raylet(self._nodes[name]).poll() is None and one is not None
        }

    def replace_ended(self) -> None:
        """Forget nodes whose main process has ended, and add as many.

        What else ran there is left alone: it has to end by itself.
        """
        living = self.raylets()
        ended = [name for name in self._nodes if name not in living]
        for name in ended:
            self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
            self.add()

    def num_alive(self) -> int:
        """Return how many nodes Ray takes for alive, without the head."""
        num_alive: int = sum(node["Alive"] for node in ray_api.nodes())
        return num_alive - 1

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def _raylet(node: Any) -> "Popen[bytes]":
    (raylet,) = node.all_processes["raylet"]
    process: Popen[bytes] = raylet.process
    return process


@contextmanager
def running_nodes(folder: Path, num_nodes: int) -> Iterator[RayNodes]:
    """Yield a cluster of a head and so many nodes; end all of its processes."""
    with handlers_kept():
        nodes = RayNodes(folder)
    try:
        for _ in range(num_nodes):
            nodes.add()
        yield nodes
    finally:
        with interrupts_held():
            nodes.close()
