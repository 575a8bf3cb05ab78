"""The operations on a pool of blocks that are timed, the same for kvferry and for vLLM.

Standard library only: vLLM's side loads this file in an interpreter that has no kvferry.
"""

import gc
import hashlib
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

BLOCK_TOKENS = 16
NUM_BLOCKS = 8192
"""Blocks of the timed pool. It is full of cached blocks: each allocation evicts as many."""

BLOCKS_PER_CYCLE = 2048
"""Blocks of all requests of one timing together: a quarter of the pool."""

_FILL_REQUEST_BLOCKS = 1000


class Manager(Protocol):
    """What the operations need of a cache manager of one full-attention group."""

    def make_request(self, name: str, hashes: list[bytes]) -> Any:
        """Return a request of `len(hashes)` full blocks and one more token."""
        ...

    def lookup(self, request: Any) -> int:
        """Find the longest cached prefix and return its tokens."""
        ...

    def allocate(self, request: Any) -> bool:
        """Grant slots for the full blocks, make them findable; tell whether they fit."""
        ...

    def free(self, request: Any) -> None:
        """Give the request's blocks back."""
        ...

    def settle(self) -> None:
        """Do what is due between steps and is not timed."""
        ...


MakeManager = Callable[[int], Manager]
"""Makes a manager with a pool of so many blocks, the null block included."""


class PoolOperations:
    """Times a manager's operations; one object per process under test."""

    def __init__(self, make_manager: MakeManager) -> None:
        self._make_manager = make_manager
        self._numbers = count()
        self._manager: Manager | None = None

    def time_cycle(self, num_blocks: int) -> dict[str, float]:
        """Return ns per block of allocate, free and lookup of requests of `num_blocks` blocks.

        The requests have new content. They are all allocated, then all freed, then all looked up.
        """
        if self._manager is None:
            self._manager = self._make_manager(NUM_BLOCKS)
            self._fill(self._manager, NUM_BLOCKS)
        manager = self._manager
        total = BLOCKS_PER_CYCLE
        requests = [self._new_request(manager, num_blocks) for _ in range(total // num_blocks)]
        granted, allocate_ns = _timed(manager.allocate, requests)
        _, free_ns = _timed(manager.free, requests)
        found, lookup_ns = _timed(manager.lookup, requests)
        manager.settle()
        if not all(granted) or set(found) != {num_blocks * BLOCK_TOKENS}:
            raise RuntimeError(f"granted {set(granted)}, found {set(found)} tokens")
        return {
            "allocate": allocate_ns / total,
            "free": free_ns / total,
            "lookup": lookup_ns / total,
        }

    def measure_memory(self, num_blocks: int) -> dict[str, float]:
        """Return Python-allocated bytes per block of a pool: empty, and with every block hashed."""
        self._manager = None
        gc.collect()
        tracemalloc.start()
        try:
            manager = self._make_manager(num_blocks)
            gc.collect()
            empty = tracemalloc.get_traced_memory()[0]
            self._fill(manager, num_blocks)
            gc.collect()
            hashed = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        return {"empty": empty / num_blocks, "hashed": hashed / num_blocks}

    def _fill(self, manager: Manager, num_blocks: int) -> None:
        """Leave every block but the null block cached and free."""
        left = num_blocks - 1
        while left:
            request = self._new_request(manager, min(left, _FILL_REQUEST_BLOCKS))
            if not manager.allocate(request):
                raise RuntimeError("a request did not fit")
            manager.free(request)
            manager.settle()
            left -= min(left, _FILL_REQUEST_BLOCKS)

    def _new_request(self, manager: Manager, num_blocks: int) -> Any:
        number = next(self._numbers)
        hashes = [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(num_blocks)]
        return manager.make_request(f"request-{number}", hashes)


def _timed(operation: Callable[[Any], Any], requests: Sequence[Any]) -> tuple[list[Any], int]:
    """Return the results and the nanoseconds of an operation on every request, without gc."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter_ns()
        results = [operation(request) for request in requests]
        return results, time.perf_counter_ns() - start
    finally:
        gc.enable()
