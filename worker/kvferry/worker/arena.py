"""Memory that other processes of this host may read: anonymous, of one size for ever, nameless.

A memfd has no name in any file system, so nothing is left behind however its owner ends, and a
mapping of it outlives the owner. Sealed against shrinking, it cannot fault a reader; sealed against
writing by later mappings, it can be handed out.
"""

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import MismatchError

HostBytes = npt.NDArray[np.uint8]

# Linux 5.1; Python names it from 3.13 on.
F_SEAL_FUTURE_WRITE = 0x0010
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class Arena:
    """`num_bytes` of memory, zeroed, and the descriptor that others map it by.

    The descriptor is closed once nothing uses the memory any more.

    Raises:
        OSError: there is not so much memory, or the system has no sealed memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, max(num_bytes, 1))
        self._memory = mmap.mmap(self.fd, max(num_bytes, 1))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

    def bytes(self) -> HostBytes:
        """Return the memory; it lives as long as this, or the arena, is used."""
        return np.frombuffer(self._memory, dtype=np.uint8)


def open_arena(num_bytes: int) -> Arena | None:
    """Return a new arena, or None on a system that has no sealed memory without names.

    Raises:
        MemoryError: there is not so much memory.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Arena(num_bytes)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"no room for {num_bytes} bytes") from error
        return None


def map_arena(fd: int, num_bytes: int) -> HostBytes:
    """Return another process's arena, for reading; `fd` is no longer needed then.

    Raises:
        MismatchError: not an arena of at least `num_bytes` that can be trusted to stay so.
    """
    try:
        size = os.fstat(fd).st_size
        if size < num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise MismatchError(
                "not the sealed memory of a worker",
                given=f"{size} bytes",
                allowed=f"at least {num_bytes} bytes, sealed",
            )
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise MismatchError("the memory cannot be mapped", given=str(error)) from error
    return np.frombuffer(mapped, dtype=np.uint8)


def written_extents(fd: int) -> list[slice]:
    """Return which bytes of an arena have been written; the others have no memory yet."""
    extents, end = [], 0
    # The system says in this way that nothing comes any more.
    with suppress(OSError):
        while True:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            extents.append(slice(begin, end))
    return extents


def touch(memory: HostBytes, extents: Iterable[slice]) -> None:
    """Read a byte of each page, so that whoever copies them does not wait for their mapping.

    Those that are not written are left out: reading one would take memory for it.
    """
    for extent in extents:
        memory[extent][:: mmap.PAGESIZE].max()


def cut(memory: HostBytes, sizes: Iterable[int]) -> list[HostBytes]:
    """Return consecutive pieces of these sizes, each beginning on a page."""
    sizes = list(sizes)
    begins = accumulate((page_aligned(size) for size in sizes), initial=0)
    return [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def page_aligned(num_bytes: int) -> int:
    """Return the bytes of the pages that hold so many."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
