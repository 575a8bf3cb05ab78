"""A Redis server beside ours, where `redis-server` and its client with hiredis are installed."""

import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry.proto.errors import DeadlineError

START_TIMEOUT_S = 10.0


def redis_is_here() -> bool:
    """Return whether a Redis server can be started and asked."""
    clients = all(importlib.util.find_spec(name) for name in ("redis", "hiredis"))
    return clients and shutil.which("redis-server") is not None


@contextmanager
def redis_get(block_bytes: int, num_blocks: int) -> Iterator[Callable[[], object] | None]:
    """Yield what fetches all blocks from a Redis server once, or None where there is none.

    As a cache on Redis would: a GET for each block, and its bytes copied to where they belong, in
    disorder. No checksums.

    Raises:
        DeadlineError: the server did not start.
    """
    if not redis_is_here():
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            client = _connect(port)
            for index in range(num_blocks):
                client.set(f"block-{index}", os.urandom(block_bytes))
            yield _Fetch(client, block_bytes, num_blocks).once
        finally:
            server.kill()


class _Fetch:
    def __init__(self, client: Any, block_bytes: int, num_blocks: int) -> None:
        self._client = client
        self._block_bytes = block_bytes
        self._into = np.ones(2 * num_blocks * block_bytes, dtype=np.uint8).data
        self._places = np.random.default_rng(4).permutation(2 * num_blocks)[:num_blocks].tolist()

    def once(self) -> None:
        for index, place in enumerate(self._places):
            begin = place * self._block_bytes
            found = self._client.get(f"block-{index}")
            self._into[begin : begin + self._block_bytes] = found


def _connect(port: int) -> Any:
    redis: Any = importlib.import_module("redis")
    client = redis.Redis(port=port)
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > end_s:
                raise DeadlineError(
                    "redis-server did not start", allowed=f"{START_TIMEOUT_S} s"
                ) from None
            time.sleep(0.05)
