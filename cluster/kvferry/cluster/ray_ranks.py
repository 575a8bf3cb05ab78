"""The ranks of an instance as Ray actors: rank 0 makes the others, and they end with it."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.ray_handles import get
from kvferry.cluster.serving.engine import MAX_PARALLEL_LOADS
from kvferry.cluster.serving.rank import Rank, RankSettings
from kvferry.proto.step_messages import MAX_MOVES

remote: Any = ray.remote  # its types do not know max_concurrency
RANK_THREADS = MAX_PARALLEL_LOADS + MAX_MOVES + 5
"""Rank 0 may have so many pulls under way. None of them may keep waiting a pass, a ping, a cancel,
what is told of blocks, or the call that is parked until the rank ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Where the ranks of one instance run, and what each of them gets.

    `group` has one bundle per rank.
    """

    service_id: str
    group: PlacementGroup
    cpus: float
    gpus: int
    environment: dict[str, dict[str, str]]

    def make(self, kind: type, settings: RankSettings, *arguments: Any) -> "ActorHandle[Any]":
        """Start an actor of this class in its rank's bundle."""
        actor = remote(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=RANK_THREADS,
        )(kind)
        handle: ActorHandle[Any] = actor.options(
            name=naming.rank_name(self.service_id, settings.instance_id, settings.rank),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, settings.rank),
            runtime_env=self.environment,
        ).remote(settings, *arguments)
        return handle


def spawn_rank(place: RankPlacement, settings: RankSettings) -> "RayRank":
    """Start a rank that ends with the process that calls this, and return its port."""
    handle = place.make(Rank, settings, ray_cluster.node_host, ray_cluster.node_id)
    return RayRank(handle, f"rank {settings.rank} of {settings.instance_id}")


class RayRank:
    """`RankPort` over an actor handle."""

    def __init__(self, handle: "ActorHandle[Any]", who: str) -> None:
        self._handle = handle
        self._who = who

    def begin(self, method: str, *arguments: Any) -> "RayCall":
        """See `RankPort.begin`."""
        return RayCall(getattr(self._handle, method).remote(*arguments), self._who)


class RayCall:
    """`PendingCall` over an object reference."""

    def __init__(self, ref: Any, who: str) -> None:
        self._ref = ref
        self._who = who

    def done(self, timeout_s: float) -> bool:
        """See `PendingCall.done`."""
        done, _ = ray.wait([self._ref], timeout=timeout_s)
        return bool(done)

    def result(self, timeout_s: float) -> Any:
        """See `PendingCall.result`."""
        return get(self._ref, timeout_s=timeout_s, who=self._who)
