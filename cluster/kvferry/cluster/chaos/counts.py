"""What a service at rest holds and uses: it must be the same before the faults and after."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.processes import Process, Usage
from kvferry.proto.messages import Description

ACTORS = ("RayCoordinatorActor", "RankActor")
"""Processes of the service, as their titles call them."""

MEMORY_MARGIN = 1.15
MEMORY_SLACK_BYTES = 16 << 20
"""Memory may be so many times what it was, and so much more: allocators keep more after more work,
and tables that are bounded, as that of the coordinator's last replies, are empty at the start."""

MORE_OPEN = 1
"""Each process of the service may have so many more files and sockets open: Ray connects actors
when the first of them calls the other, and lets go of what nobody uses, in its own time."""

ASKER = "asker"
"""The process that runs the router and the faults."""

_ACTOR = re.compile(r"ray::(\w+)")
_SCRIPT = re.compile(r"([\w-]+)\.py\b")
_IDLE = "IDLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A service at one moment.

    `used_blocks` of all instances have an owner. `processes` by what they do, Ray's own included,
    but not its idle workers, which come and go. Files, sockets and memory are those of the
    coordinator, of all ranks, and of the process that asks.
    """

    instances: int
    used_blocks: int
    requests: int
    leases: int
    handoffs: int
    reservations: int
    loads: int
    processes: dict[str, int]
    files: dict[str, int]
    sockets: dict[str, int]
    memory_bytes: dict[str, int]

    @property
    def is_at_rest(self) -> bool:
        """Tell whether nothing is held for anybody."""
        held = (self.used_blocks, self.requests, self.leases, self.handoffs)
        return not any((*held, self.reservations, self.loads))

    @property
    def unknown(self) -> tuple[str, ...]:
        """The kinds of processes whose files, sockets and memory could not be read."""
        return tuple(kind for kind in (ASKER, *ACTORS) if not self.memory_bytes.get(kind))


def count(description: Description, found: Iterable[Process], own_pid: int) -> Counts:
    """Count what the coordinator tells and what the processes of the cluster use.

    Args:
        description: of the service.
        found: all processes of the cluster.
        own_pid: of the process that asks.
    """
    kinds = {one.pid: kind_of(one.title) for one in found}
    used = _usage({own_pid: ASKER} | {pid: kind for pid, kind in kinds.items() if kind in ACTORS})
    statuses = description.instances
    return Counts(
        instances=len(statuses),
        used_blocks=sum(one.num_used_blocks for one in statuses),
        requests=sum(one.num_requests for one in statuses),
        leases=description.num_leases,
        handoffs=description.num_handoffs,
        reservations=sum(one.held.reservations for one in statuses),
        loads=sum(one.held.loads for one in statuses),
        processes=dict(sorted(Counter(kind for kind in kinds.values() if kind).items())),
        files={kind: one.files for kind, one in used.items()},
        sockets={kind: one.sockets for kind, one in used.items()},
        memory_bytes={kind: one.memory_bytes for kind, one in used.items()},
    )


def _usage(kinds: Mapping[int, str]) -> dict[str, Usage]:
    """Return what all processes of a kind use together."""
    used: dict[str, Usage] = {}
    for pid, kind in sorted(kinds.items(), key=itemgetter(1)):
        one = processes.usage(pid)
        if one is not None:
            used[kind] = used[kind] + one if kind in used else one
    return used


def kind_of(title: str) -> str:
    """Return what a process of a Ray cluster does, by its title; empty for an idle worker."""
    actor = _ACTOR.match(title)
    if actor is not None:
        return "" if actor[1] == _IDLE else actor[1]
    program = Path(title.partition(" ")[0]).name
    script = _SCRIPT.search(title)
    return script[1] if program.startswith("python") and script is not None else program


def differences(before: Counts, after: Counts) -> tuple[str, ...]:
    """Return in a sentence each what has not come back to what it was."""
    found = [
        f"{name} were {was} and are {now}"
        for name in Counts.__dataclass_fields__
        if name not in ("files", "sockets", "memory_bytes")
        and (was := getattr(before, name)) != (now := getattr(after, name))
    ]
    for name in ("files", "sockets"):
        for kind, was_open in getattr(before, name).items():
            now_open = getattr(after, name).get(kind, 0)
            if now_open > was_open + MORE_OPEN * before.processes.get(kind, 1):
                found.append(f"{name} of {kind} were {was_open} and are {now_open}")
    for kind, was_bytes in before.memory_bytes.items():
        now_bytes = after.memory_bytes.get(kind, 0)
        if now_bytes > was_bytes * MEMORY_MARGIN + MEMORY_SLACK_BYTES:
            found.append(f"memory of {kind} was {was_bytes >> 20} MiB and is {now_bytes >> 20} MiB")
    return tuple(found)
