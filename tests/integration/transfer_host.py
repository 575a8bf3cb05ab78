"""Another process with workers in it, for tests: `transfer_peer.py` and how it is spoken to."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("transfer_peer.py")
SIZES: dict[str, Any] = {"num_blocks": 9, "num_layers": 2, "head_size": 64}


class Host:
    """A process with any number of workers in it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def open(self, **settings: Any) -> str:
        """Start a worker and return its address."""
        return self._ask("open " + json.dumps({"incarnation": 1, **SIZES, **settings}))

    def reuse(self, address: str, block_id: int) -> None:
        assert self._ask(f"reuse {address} {block_id}") == "done"

    def _ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def new_host() -> Iterator[Host]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(PEER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield Host(process)
        finally:
            process.kill()
