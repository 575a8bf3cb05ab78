"""Who is hit by a fault, and hitting them."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.counts import kind_of
from kvferry.cluster.chaos.faults import Fault
from kvferry.cluster.chaos.processes import Process
from kvferry.proto.messages import Description

COORDINATOR = "RayCoordinatorActor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who is hit, for people, and which processes that are.

    `ends` are those that have to end of it, some of them by themselves.
    """

    name: str
    hit: tuple[Process, ...]
    ends: tuple[Process, ...]


def target_of(
    fault: Fault, description: Description, raylets: Mapping[str, Process], folder: Path
) -> Target:
    """Return whom a fault hits.

    Args:
        fault: says which of those that there are.
        description: of the service, all of whose instances live.
        raylets: the main process of each node.
        folder: of all files of the cluster.
    """
    match fault.kind:
        case "kill_coordinator" | "pause_coordinator":
            found = processes.using(folder)
            hit = ends = tuple(one for one in found if kind_of(one.title) == COORDINATOR)
            name = "coordinator"
        case "kill_instance" | "pause_instance":
            infos = {str(one.info.instance_id): one.info for one in description.instances}
            name = fault.victim(sorted(infos))
            rank = processes.find(infos[name].rank_pids[0])
            hit = ends = (rank,) if rank is not None else ()
        case "kill_raylet":
            name = fault.victim(sorted(raylets))
            hit, ends = (raylets[name],), processes.family(raylets[name])
        case "kill_node" | "pause_node":
            name = fault.victim(sorted(raylets))
            hit = ends = processes.family(raylets[name])
    return Target(name=name, hit=hit, ends=() if fault.is_pause else ends)


async def strike(fault: Fault, target: Target) -> None:
    """Kill all processes of the target, or stop them for as long as the fault says."""
    if not fault.is_pause:
        _send_all(target, signal.SIGKILL)
        return
    _send_all(target, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.pause_s)
    finally:
        _send_all(target, signal.SIGCONT)


def _send_all(target: Target, number: int) -> None:
    for process in target.hit:
        processes.send(process, number)
