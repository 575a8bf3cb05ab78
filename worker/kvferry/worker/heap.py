"""The C library's heap, told to keep what messages of a megabyte are made of."""

import ctypes
from functools import cache

# malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 64 << 20
LARGEST_KEPT_BYTES = 32 << 20


@cache
def keep_freed_memory() -> None:
    """Let glibc keep up to `KEPT_BYTES` of freed memory, once for this process.

    Otherwise it gives every message's memory back and takes it anew, a page fault for each 4 KiB:
    receiving over gRPC takes 1.5 times as long. Elsewhere than on glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
