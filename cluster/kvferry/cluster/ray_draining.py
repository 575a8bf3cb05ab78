"""Which nodes Ray takes away; the only place that asks Ray's private state."""

import time
from typing import Any

from ray._private import state

from kvferry.cluster.node_drains import Leaving

ray_state: Any = state.state  # private, and not typed


def leaving_nodes() -> Leaving:
    """Return the nodes that are being drained, with the seconds that they have left."""
    now_s = time.time()
    return {
        node_id: deadline_ms / 1000 - now_s if deadline_ms else None
        for node_id, deadline_ms in ray_state.get_draining_nodes().items()
    }
