"""How much memory this process may use and has used, as Linux tells it in files."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def total_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the memory of this machine or the limit of a control group, whichever is less.

    Args:
        proc: where the kernel tells of processes.
        cgroups: where the control groups are mounted, version 1 or 2.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits(proc, cgroups)])


def peak_resident_bytes(work: Callable[[], object], proc: Path = PROC) -> int:
    """Run `work` and return the most that this process had in memory meanwhile.

    All that it had there before counts as well.
    """
    # The kernel begins a new peak at this write. Where it is not allowed, the peak is that since
    # the process began: never too little.
    with contextlib.suppress(OSError):
        (proc / "self" / "clear_refs").write_text("5")
    work()
    status = (proc / "self" / "status").read_text()
    (kibibytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(kibibytes) * 1024


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the limits of this process's control group and of those around it."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the mount often begins at its own group, and the path leads nowhere.
        folder = root / path.strip("/")
        for around in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                yield int((around / name).read_text())
            if around == root:
                break
