"""A node as Ray runs it: when its process dies, Ray makes another, which serves by itself."""

import logging
import threading

import ray

from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.proto.errors import KvferryError

RESTART_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class RayStoreNode(StoreNode):
    """A `StoreNode` that starts again after a death; its stores are empty then."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config)
        self._stopping = threading.Event()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            threading.Thread(target=self._start_again, name="kvferry-start", daemon=True).start()

    def stop(self) -> None:
        """See `StoreNode.stop`."""
        self._stopping.set()
        super().stop()

    def _start_again(self) -> None:
        """Start, however long it takes: nobody would call `start` once more."""
        while not self._stopping.is_set():
            try:
                self.start()
                return
            except KvferryError as error:
                _log.warning("the node cannot start yet: %s", error)
            self._stopping.wait(RESTART_PAUSE_S)
