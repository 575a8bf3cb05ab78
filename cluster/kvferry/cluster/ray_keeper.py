"""Keeps a local Ray cluster until SIGTERM: `python -m kvferry.cluster.ray_keeper NAME RECORD`.

RECORD, where it writes the cluster down, tells it from keepers of other users and tests.
"""

import os
import signal
import sys
import threading
from typing import Any

import ray

from kvferry.cluster import local_cluster, naming, ray_cluster
from kvferry.cluster.local_cluster import LocalCluster

ray_api: Any = ray  # parts of Ray's interface are not typed


def main() -> None:
    """Run the cluster, write down where it is, and end it when told to."""
    name = sys.argv[1]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with ray_cluster.connected("local", num_ranks=1, namespace=naming.SERVICES_NAMESPACE):
        local_cluster.write(
            name,
            LocalCluster(
                pid=os.getpid(),
                address=ray_api.get_runtime_context().gcs_address,
                auth_mode=os.environ["RAY_AUTH_MODE"],
                token=os.environ.get("RAY_AUTH_TOKEN", ""),
            ),
        )
        ended.wait()
    local_cluster.record(name).unlink(missing_ok=True)
    local_cluster.log_file(name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
