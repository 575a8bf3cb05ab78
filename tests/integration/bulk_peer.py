"""A fresh process with a worker of 1 MiB blocks in it, for tests of how much memory transfers take.

It obeys its standard input; all its memory has been touched before anything is moved, so that what
it takes beyond its peak until then is what a transfer takes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.integration.transfer_peer import FirstBlocks, content_of, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.ids import FIRST_GROUP, BlockId
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.frames import Place
from kvferry.worker.pull import BlockRun
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_client import TransferClient

MIB = 1 << 20
NUM_LAYERS = 4
TIMEOUT_S = 250.0


class BulkPeer:
    """The process and its worker of `num_mib` blocks, `full` or taking stores.

    Killed at the end of a `with`.
    """

    def __init__(self, num_mib: int, *, full: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(num_mib), "full" if full else "empty"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._address = ""
        self._peak_before = 0

    @property
    def address(self) -> str:
        """Where it serves; waits until it does."""
        if not self._address:
            self._address = self._answer()
            self._peak_before = self._peak_bytes()
        return self._address

    def ask(self, command: str) -> str:
        """Return the answer to `pull <address>`, `store <address>`, `check`, `wipe` or `sent`."""
        assert self.address
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def grown_bytes(self) -> int:
        """How much more memory it has used at once since it began to serve than before."""
        return self._peak_bytes() - self._peak_before

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (kibibytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return int(kibibytes) * 1024

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def wipe(worker: WorkerService) -> None:
    """Overwrite and forget all blocks."""
    (group,) = worker.memory.groups
    block_ids = [BlockId(block) for block in range(1, group.num_blocks)]
    worker.reused(block_ids)
    for block_id in block_ids:
        scatter(group, [Place(block_id, 0, NUM_LAYERS)], b"\xee" * MIB)


def is_right(worker: WorkerService) -> bool:
    """Tell whether every block has the bytes it should have."""
    (group,) = worker.memory.groups
    return all(
        gather(group, [Place(BlockId(block), 0, NUM_LAYERS)]) == content_of(block - 1, MIB)
        for block in range(1, group.num_blocks)
    )


def obey(worker: WorkerService, command: str, run: BlockRun, address: str) -> object:
    match command:
        case "pull":
            return pull_blocks(worker, address, [run], timeout_s=TIMEOUT_S).num_blocks_of_run[0]
        case "store":
            return TransferClient().store(
                address, run, identity=worker.identity, memory=worker.memory, timeout_s=TIMEOUT_S
            )
        case "check":
            return is_right(worker)
        case "wipe":
            wipe(worker)
            return "wiped"
        case "sent":
            return worker.stats().of("served").num_bytes
    raise AssertionError(command)


def main() -> None:
    num_mib, content = int(sys.argv[1]), sys.argv[2]
    worker = new_worker(1, num_blocks=num_mib + 1, num_layers=NUM_LAYERS, head_size=16384)
    run = BlockRun(
        group_id=FIRST_GROUP,
        hashes=[hash_of(index) for index in range(num_mib)],
        block_ids=[BlockId(1 + index) for index in range(num_mib)],
    )
    if content == "full":
        fill(worker)
    else:
        wipe(worker)
        worker.reserver = FirstBlocks()
    print(worker.serve(), flush=True)
    for line in sys.stdin:
        command, *address = line.split()
        print(obey(worker, command, run, "".join(address)), flush=True)


if __name__ == "__main__":
    main()
