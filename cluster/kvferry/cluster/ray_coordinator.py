"""The coordinator as Ray runs it: when its process dies, Ray makes another, which goes on.

It also drains the members of nodes that Ray takes away.
"""

import gc
from typing import Any

import ray

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.coordinator_process import CoordinatorProcess, FrontAddresses, FrontSettings
from kvferry.cluster.node_drains import NodeDrains
from kvferry.cluster.ray_draining import leaving_nodes
from kvferry.cluster.ray_frozen import FrozenWatch
from kvferry.cluster.ray_record import RayRecord
from kvferry.cluster.ray_revival import Revival
from kvferry.cluster.up_config import CoordinatorConfig

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
        warm_share, core: settings of `CoordinatorActor`.
    """

    def __init__(
        self, *, service_id: str, fronts: FrontSettings, warm_share: float = 0.0, **core: Any
    ) -> None:
        super().__init__(
            record=RayRecord(service_id),
            fronts=fronts,
            reach_host=ray_cluster.node_host,
            warm_share=warm_share,
            **core,
        )
        self._settings = CoordinatorConfig(
            bind=fronts.bind,
            insecure=fronts.insecure,
            credentials=fronts.credentials,
            warm_share=warm_share,
        )
        self._drains = NodeDrains(self.call, leaving_nodes)
        self._service_id = service_id
        self._frozen: FrozenWatch | None = None
        self._revival = Revival(self.start, "the coordinator")

    def settings(self) -> CoordinatorConfig:
        """Return what this coordinator is made of."""
        return self._settings

    def start(self) -> FrontAddresses:
        """See `CoordinatorProcess.start`."""
        addresses = super().start()
        self._drains.start()
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
        self._drains.stop()
        if self._frozen is not None:
            self._frozen.stop()
        super().stop()

    def _nodes(self) -> list[str]:
        """Return the names of the service's nodes."""
        names: list[str] = ray_api.util.list_named_actors()
        return [n for n in names if naming.host_of_node(self._service_id, n) is not None]
