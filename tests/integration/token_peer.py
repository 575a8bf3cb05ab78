"""A process with a worker in it that has a prompt's blocks: `token_peer.py`, and how to start it.

Its settings are its argument; it writes its address, then "held" whenever a fetch has come to the
block before which it stops, for good.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.integration.token_model import fill, new_worker

from kvferry.worker import bulk_server
from kvferry.worker.paths import Path as WayOfBytes


class TokenPeer:
    """The process, killed at the end of a `with` if not before."""

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        num_blocks: int,
        hold_at: int | None = None,
        paths: Sequence[WayOfBytes] = (),
    ) -> None:
        settings = {
            "tokens": list(tokens),
            "num_blocks": num_blocks,
            "hold_at": hold_at,
            "paths": list(paths),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def read_line(self) -> str:
        """Return what it says next: its address at first."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL; return when it is gone. Repeating is fine."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    settings = json.loads(sys.argv[1])
    bulk_server.MIN_BULK_BYTES = 1
    worker = new_worker(settings["num_blocks"], paths=settings["paths"])
    worker.hold_at = settings["hold_at"]
    fill(worker, settings["tokens"])
    print(worker.serve(), flush=True)
    while worker.held.acquire():
        print("held", flush=True)


if __name__ == "__main__":
    main()
