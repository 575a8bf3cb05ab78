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

from kvferry.proto.errors import DeadlineError

START_TIMEOUT_S = 10.0


def redis_is_here() -> bool:
    """Return whether a Redis server can be started and asked."""
    clients = all(importlib.util.find_spec(name) for name in ("redis", "hiredis"))
    return clients and shutil.which("redis-server") is not None


@contextmanager
def redis_get(block_bytes: int, num_blocks: int) -> Iterator[Callable[[], object] | None]:
    """Yield what reads all blocks from a Redis server once, or None where there is none.

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
            names = [f"block-{index}" for index in range(num_blocks)]
            for name in names:
                client.set(name, os.urandom(block_bytes))
            yield lambda: [client.get(name) for name in names]
        finally:
            server.kill()


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
