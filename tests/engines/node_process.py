"""A node in a process of its own, so that it can be killed: coordinator, port, bytes of a store."""

import sys
import threading

from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig

coordinator, port, store_bytes = sys.argv[1:]
node = StoreNode(
    NodeConfig(
        host="127.0.0.1", coordinator=coordinator, store_bytes=int(store_bytes), port=int(port)
    )
)
print(node.start(), flush=True)
threading.Event().wait()
