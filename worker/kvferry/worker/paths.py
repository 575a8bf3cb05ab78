"""The ways in which the bytes of a fetch may travel, and which processes can share memory."""

import os
import platform
from functools import cache
from typing import Literal, get_args

Path = Literal["shm", "bulk"]
"""Copied by the receiver itself, or over a socket of its own. The stream of the call, gRPC, is what
always works and needs no naming."""

ALL_PATHS: tuple[Path, ...] = get_args(Path)

# Readers of shared memory look at a generation after they have copied. That proves something only
# where a processor does not let a load pass an earlier one, nor a store an earlier store.
_ORDERED_MACHINES = ("x86_64", "AMD64")


@cache
def this_place() -> str:
    """Return what tells this machine, network and user namespace, and user from all others.

    Processes that get the same answer can hand each other memory. "" where none can.
    """
    if platform.system() != "Linux" or platform.machine() not in _ORDERED_MACHINES:
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "user")]
    except OSError:
        return ""
    return f"{boot_id}/{namespaces[0]}/{namespaces[1]}/{os.getuid()}"
