"""A node as Ray runs it: when its process dies, Ray makes another, which serves by itself."""

from kvferry.cluster import ray_cluster
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.ray_record import find_front
from kvferry.cluster.ray_revival import Revival


class RayStoreNode(StoreNode):
    """A `StoreNode` that starts again after a death; its stores are empty then.

    Args:
        config: of the node.
        service_id: of its service, whose coordinator may move.
    """

    def __init__(self, config: NodeConfig, service_id: str) -> None:
        super().__init__(config, find_front(service_id), ray_cluster.node_id)
        self._revival = Revival(self.start, "the node")

    def stop(self) -> None:
        """See `StoreNode.stop`."""
        self._revival.give_up()
        super().stop()
