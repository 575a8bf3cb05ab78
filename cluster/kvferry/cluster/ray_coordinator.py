"""The coordinator as Ray runs it: when its process dies, Ray makes another, which goes on."""

import gc
from typing import Any

import ray

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.coordinator_process import CoordinatorProcess, FrontAddresses, FrontSettings
from kvferry.cluster.ray_frozen import FrozenWatch
from kvferry.cluster.ray_record import RayRecord
from kvferry.cluster.ray_revival import Revival

OPTIONS = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0}
"""Of actors that always come back, and of whose calls none is made twice, as it may have run."""

ray_api: Any = ray  # parts of Ray's interface are not typed
_RARE_COLLECTIONS = (100_000, 20, 20)


class RayCoordinatorActor(CoordinatorProcess):
    """A `CoordinatorProcess` with its record in Ray, which starts again after a death.

    Args:
        service_id: as in `naming`; under it the record is kept, and deleted by whoever ends the
            service.
        fronts: where it listens.
        core: settings of `CoordinatorActor`.
    """

    def __init__(self, *, service_id: str, fronts: FrontSettings, **core: Any) -> None:
        super().__init__(
            record=RayRecord(service_id),
            fronts=fronts,
            reach_host=ray_cluster.node_host,
            **core,
        )
        self._service_id = service_id
        self._frozen: FrozenWatch | None = None
        self._revival = Revival(self.start, "the coordinator")

    def start(self) -> FrontAddresses:
        """See `CoordinatorProcess.start`."""
        addresses = super().start()
        # The core makes no reference cycles, but its many small tuples set the collector off all
        # the time: it took two fifths of an engine step. What is here now stays for good.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_RARE_COLLECTIONS)
        if self._frozen is None:
            self._frozen = FrozenWatch(self._nodes)
        return addresses

    def stop(self) -> None:
        """See `CoordinatorProcess.stop`."""
        self._revival.give_up()
        if self._frozen is not None:
            self._frozen.stop()
        super().stop()

    def _nodes(self) -> list[str]:
        """Return the names of the service's nodes."""
        names: list[str] = ray_api.util.list_named_actors()
        return [n for n in names if naming.host_of_node(self._service_id, n) is not None]
