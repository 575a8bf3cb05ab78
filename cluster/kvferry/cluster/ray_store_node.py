"""A node as Ray runs it: when its process dies, Ray makes another, which serves by itself."""

from kvferry.cluster import naming
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.ray_frozen import FrozenWatch
from kvferry.cluster.ray_record import find_front
from kvferry.cluster.ray_revival import Revival


class RayStoreNode(StoreNode):
    """A `StoreNode` that starts again after a death; its stores are empty then.

    It looks after its coordinator, as the coordinator looks after all nodes.

    Args:
        config: of the node.
        service_id: of its service, whose coordinator may move.
    """

    def __init__(self, config: NodeConfig, service_id: str) -> None:
        super().__init__(config, find_front(service_id))
        self._coordinator_name = naming.coordinator_name(service_id)
        self._frozen: FrozenWatch | None = None
        self._revival = Revival(self.start, "the node")

    def start(self) -> str:
        """See `StoreNode.start`."""
        address = super().start()
        self._frozen = FrozenWatch(lambda: [self._coordinator_name], have_started=True)
        return address

    def stop(self) -> None:
        """See `StoreNode.stop`."""
        self._revival.give_up()
        if self._frozen is not None:
            self._frozen.stop()
        super().stop()
