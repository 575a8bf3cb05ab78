"""The service under chaos as a whole: whether all of it lives, and what it holds."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.counts import Counts, count
from kvferry.cluster.chaos.processes import Process
from kvferry.cluster.ray_launcher import RayService
from kvferry.cluster.ray_nodes import RayNodes
from kvferry.cluster.serving.router import Router
from kvferry.proto.errors import KvferryError
from kvferry.proto.messages import Describe, Description, expect

RECOVERY_TIMEOUT_S = 120.0
REST_TIMEOUT_S = 60.0
POLL_S = 0.2
ANSWER_TIMEOUT_S = 2.0


class WholeService:
    """A service, its router and its nodes.

    Args:
        service: has been started.
        router: serves its requests.
        nodes: it runs on.
        folder: of all files of the cluster.
    """

    def __init__(self, service: RayService, router: Router, nodes: RayNodes, folder: Path) -> None:
        self.router = router
        self.nodes = nodes
        self.folder = folder
        self._service = service
        self._num_nodes = len(nodes.raylets())
        self._num_instances = service.config.num_instances

    async def described(self) -> Description | None:
        """Return the coordinator's view, None if it does not answer."""
        try:
            reply = await self._service.coordinator.call(Describe(), timeout_s=ANSWER_TIMEOUT_S)
        except KvferryError:
            return None
        return expect(reply, Description)

    async def whole(self) -> Description | None:
        """Return the coordinator's view if every node and instance lives and serves.

        Nodes that have ended are replaced.
        """
        await asyncio.to_thread(self.nodes.replace_ended)
        if await asyncio.to_thread(self.nodes.num_alive) != self._num_nodes:
            return None
        description = await self.described()
        if description is None or len(description.instances) != self._num_instances:
            return None
        for one in description.instances:
            if one.state != "live" or not self.router.is_alive(one.info.instance_id):
                return None
            ranks = [processes.find(pid) for pid in one.info.rank_pids]
            if not all(rank is not None and rank.is_running for rank in ranks):
                return None
        return description

    async def recovered(self, after: Sequence[Process] = ()) -> Description | None:
        """Wait until these processes have ended, and all is whole.

        None if it is not within `RECOVERY_TIMEOUT_S`.
        """
        end_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            description = await self.whole()
            if description is not None and not any(map(processes.lives, after)):
                return description
            if time.monotonic() > end_s:
                return None
            await asyncio.sleep(POLL_S)

    async def counts_when(self, is_it: Callable[[Counts], bool]) -> Counts | None:
        """Return the counts as soon as they are so, or what they are after `REST_TIMEOUT_S`.

        None if the coordinator does not answer by then.
        """
        end_s = time.monotonic() + REST_TIMEOUT_S
        while True:
            description = await self.described()
            counts = None
            if description is not None:
                counts = count(description, processes.using(self.folder), os.getpid())
                if is_it(counts):
                    return counts
            if time.monotonic() > end_s:
                return counts
            await asyncio.sleep(POLL_S)
