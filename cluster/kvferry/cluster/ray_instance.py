"""One instance of a service in Ray: its place, and rank 0 of its present life."""

import contextlib
import functools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.ray_draining import leaving_nodes
from kvferry.cluster.ray_handles import RayEngine, get
from kvferry.cluster.ray_ranks import RankPlacement, spawn_rank
from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.rank import RankSettings
from kvferry.cluster.serving.rank_actor import RankActor
from kvferry.proto.errors import DeadlineError, UnavailableError
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import InstanceInfo

PLACE_AGAIN_TIMEOUT_S = 30.0
"""So long a place is waited for when that of a dead instance went with its node."""

PLACE_ANEW_TIMEOUT_S = 5.0
"""So long room is waited for in an attempt to start an instance that has left its place."""

POLL_S = 0.2
RESULT_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RayInstance:
    """`place` it, `begin` it; when it has died, `start_again`.

    Args:
        service_id: of the service that it belongs to.
        settings: of its rank 0.
        cpus, gpus: of each rank.
        environment: Ray's runtime environment of each rank.
        start_timeout_s: for its next lives.
    """

    service_id: str
    settings: RankSettings
    cpus: float
    gpus: int
    environment: dict[str, dict[str, str]]
    start_timeout_s: float
    rank_0: "ActorHandle[Any] | None" = field(init=False, default=None)
    _group: PlacementGroup | None = field(init=False, default=None)

    @property
    def instance_id(self) -> InstanceId:
        """Its name, in all its lives."""
        return self.settings.instance_id

    def place(self, timeout_s: float) -> None:
        """Reserve a place for every rank, and make rank 0.

        Raises:
            ResourcesError: as `ray_cluster.reserve_bundles`.
        """
        resources = {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})
        self._group = ray_cluster.reserve_bundles(
            [resources] * self.settings.layout.num_ranks,
            name=naming.group_name(self.service_id, self.instance_id),
            who=f"instance {self.instance_id}",
            timeout_s=timeout_s,
        )
        self._make()

    def begin(self, coordinator: CoordinatorClient) -> Any:
        """Let it start, and return Ray's reference to the `InstanceInfo` that comes of it."""
        assert self.rank_0 is not None
        return self.rank_0.start.remote(coordinator)

    def link(self, info: InstanceInfo) -> EngineLink:
        """Return its present life as a router reaches it."""
        assert self.rank_0 is not None
        engine = RayEngine(self.rank_0, self.instance_id)
        return EngineLink(engine=engine, role=info.role, incarnation=info.incarnation)

    def start_again(
        self, coordinator: CoordinatorClient, given_up: threading.Event
    ) -> InstanceInfo:
        """End what is left of its last life, and return the next one when it serves.

        Args:
            coordinator: whom it registers with.
            given_up: when set, this ends soon with `UnavailableError`.

        Raises:
            ResourcesError: its node is gone, or it has left it, and there is no room elsewhere.
            DeadlineError: it was not ready in time.
            KvferryError: as its rank 0 raised it, or that has died.
        """
        self._kill_ranks()
        if self._group is None:
            self.place(PLACE_ANEW_TIMEOUT_S)
        else:
            self._await_place(given_up)
            self._make()
        return self._await_start(self.begin(coordinator), given_up)

    def leave(self) -> bool:
        """End what is left of a drained life, and give its place back.

        Returns:
            whether it was on a node that Ray takes away, or has lost: its next life is to `place`
            itself elsewhere.
        """
        assert self._group is not None
        try:
            leaving = leaving_nodes()
            nodes = placement_group_table(self._group)["bundles_to_node_id"].values()
            return not _is_placed(self._group) or any(node in leaving for node in nodes)
        finally:
            self._kill_ranks()
            self.remove_place()
            self.rank_0 = None

    def remove_place(self) -> None:
        """Give its place back; repeating is fine."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # with the cluster it is gone, too
                remove_placement_group(group)

    # ---------------------------------------------------------------------------------------------

    def _make(self) -> None:
        assert self._group is not None
        place = RankPlacement(
            service_id=self.service_id,
            group=self._group,
            cpus=self.cpus,
            gpus=self.gpus,
            environment=self.environment,
        )
        spawn = functools.partial(spawn_rank, place)
        self.rank_0 = place.make(
            RankActor, self.settings, ray_cluster.node_host, spawn, ray_cluster.node_id
        )

    def _kill_ranks(self) -> None:
        """End every process, frozen ones too (Ray kills those after some seconds)."""
        for rank in range(self.settings.layout.num_ranks):
            name = naming.rank_name(self.service_id, self.instance_id, rank)
            with contextlib.suppress(ValueError):  # nobody has the name
                ray.kill(ray.get_actor(name))

    def _await_place(self, given_up: threading.Event) -> None:
        # Ray itself moves a group whose node is gone, as soon as there is room for it.
        assert self._group is not None
        if _is_placed(self._group):
            return
        log.warning(
            "the node of instance %s is gone; waiting up to %g s for room on another",
            self.instance_id,
            PLACE_AGAIN_TIMEOUT_S,
        )
        end_s = time.monotonic() + PLACE_AGAIN_TIMEOUT_S
        while not _is_placed(self._group):
            given_up.wait(POLL_S)
            _require_not(given_up)
            if time.monotonic() > end_s:
                raise ray_cluster.not_placed(
                    self._group, f"instance {self.instance_id}", PLACE_AGAIN_TIMEOUT_S
                )

    def _await_start(self, starting: Any, given_up: threading.Event) -> InstanceInfo:
        end_s = time.monotonic() + self.start_timeout_s
        while not ray.wait([starting], timeout=POLL_S)[0]:
            _require_not(given_up)
            if time.monotonic() > end_s:
                raise DeadlineError(
                    f"instance {self.instance_id} was not ready in time",
                    given=f"{self.start_timeout_s:g} s",
                )
        info: InstanceInfo = get(
            starting, timeout_s=RESULT_TIMEOUT_S, who=f"instance {self.instance_id}"
        )
        return info


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def _require_not(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise UnavailableError("the service is being closed")
