"""Processes as Linux tells of them in files: whose they are, what they use, and their end."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_NOT_RUNNING = {"T", "t", "Z", "X"}  # stopped, traced, ended and not reaped, gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process.

    `started` (clock ticks since the machine started) tells it from a later one of its id.
    """

    pid: int
    parent: int
    started: int
    title: str
    state: str

    @property
    def is_running(self) -> bool:
        """Tell whether it is neither stopped nor ended."""
        return self.state not in _NOT_RUNNING

    @property
    def is_ended(self) -> bool:
        """Tell whether it has ended and only waits to be reaped."""
        return self.state in {"Z", "X"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process uses.

    `sockets` are among the open `files`; `memory_bytes` is its share of what it has mapped.
    """

    files: int
    sockets: int
    memory_bytes: int

    def __add__(self, other: "Usage") -> "Usage":
        """Return what both use together."""
        return Usage(
            files=self.files + other.files,
            sockets=self.sockets + other.sockets,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )


def find(pid: int) -> Process | None:
    """Return the process of an id, None if there is none."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
        title = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold anything, brackets and blanks too.
    fields = stat[stat.rindex(")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        title=title.replace(b"\0", b" ").decode(errors="replace").strip(),
        state=fields[0],
    )


def using(folder: Path) -> tuple[Process, ...]:
    """Return the other processes that have a file below a folder open, as all of Ray's have logs.

    Who their parent is says less: that of a killed raylet's workers is not theirs any more.
    """
    inside = f"{folder}/"
    found = [
        find(pid)
        for pid in _pids()
        if pid != os.getpid() and any(link.startswith(inside) for link in _open_files(pid))
    ]
    return tuple(one for one in found if one is not None and not one.is_ended)


def family(process: Process) -> tuple[Process, ...]:
    """Return a process, its children, and theirs."""
    children: dict[int, list[Process]] = {}
    for one in filter(None, map(find, _pids())):
        children.setdefault(one.parent, []).append(one)
    found = [process]
    for one in found:
        found += children.get(one.pid, ())
    return tuple(found)


def usage(pid: int) -> Usage | None:
    """Return what a process uses, None if it is gone."""
    links = _open_files(pid)
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    (kibibytes,) = re.findall(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    return Usage(
        files=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        memory_bytes=int(kibibytes) * 1024,
    )


def lives(process: Process) -> bool:
    """Tell whether it has not ended; a later process of its id is another one."""
    now = find(process.pid)
    return now is not None and now.started == process.started and not now.is_ended


def send(process: Process, number: int) -> None:
    """Send a signal, unless the process has ended: never to a later one of its id."""
    if lives(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end_all(folder: Path) -> None:
    """Kill the other processes that have a file below a folder open."""
    for process in using(folder):
        send(process, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(path.name) for path in PROC.iterdir() if path.name.isdigit())


def _open_files(pid: int) -> list[str]:
    """Return what a process has open; nothing if it is gone or another user's."""
    links = []
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(link))
    return links
