"""A process of `test_soak.py`: serves blocks and pulls at random from the others until told to end.

Standard input: `peers [["host:port", incarnation], ...]` names the others, `end` ends the pulls,
`facts` changes nothing; each line is answered with what has been done so far, as JSON.
"""

import json
import sys
import threading
import time
from contextlib import suppress
from random import Random
from typing import Any

import psutil
from tests.integration.transfer_peer import content_of, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.ids import FIRST_GROUP, BlockId
from kvferry.worker import bulk_server
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.frames import Place
from kvferry.worker.paths import Path
from kvferry.worker.pull import BlockRun
from kvferry.worker.service import WorkerService

NUM_SHARED = 32
"""Blocks 1 to 32 hold the hashes 0 to 31, unless they are just being evicted."""
NUM_PULLING = 2
SIZES: dict[str, Any] = {
    "num_blocks": 1 + NUM_SHARED * (1 + NUM_PULLING),
    "num_layers": 2,
    "head_size": 2048,
}
BLOCK_BYTES = 2 * 16 * 2048
TIMEOUT_S = 8.0
PATHS: tuple[tuple[Path, ...], ...] = ((), ("bulk",), ("shm",))

CONTENT = [content_of(index, BLOCK_BYTES) for index in range(NUM_SHARED)]


class Soak:
    """One worker that serves, one for each path that pulls, and what went how."""

    def __init__(self, incarnation: int, seed: int) -> None:
        self._seed = seed
        self.server = new_worker(incarnation, **SIZES, paths=("shm", "bulk"))
        fill(self.server)
        self.takers = [new_worker(incarnation, **SIZES, paths=paths) for paths in PATHS]
        self.address = self.server.serve()
        self.peers: list[tuple[str, int]] = []
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self.outcomes: dict[str, int] = {}
        self.num_blocks = 0
        self.wrong: list[str] = []
        self.longest_s = 0.0

    def pull_at_random(self, number: int) -> None:
        """Pull from random peers by random paths until the end; some pulls are given up early."""
        random = Random(f"{self._seed} {number}")
        first_block = 1 + NUM_SHARED * (1 + number)
        while not self.ended.wait(random.random() * 0.02):
            if not self.peers:
                continue
            address, incarnation = random.choice(self.peers)
            begin = random.randrange(NUM_SHARED)
            indexes = range(begin, random.randrange(begin, NUM_SHARED) + 1)
            taker = random.choice(self.takers)
            block_ids = [BlockId(first_block + at) for at in range(len(indexes))]
            cancel = threading.Event()
            canceller = threading.Timer(random.random() * 0.05, cancel.set)
            if random.random() < 0.15:
                canceller.start()
            timeout_s = 0.02 if random.random() < 0.1 else TIMEOUT_S
            started_s = time.monotonic()
            hashes = [hash_of(index) for index in indexes]
            outcome = pull_blocks(
                taker,
                address,
                [BlockRun(group_id=FIRST_GROUP, hashes=hashes, block_ids=block_ids)],
                incarnation=incarnation,
                timeout_s=timeout_s,
                cancel=cancel,
            )
            seconds = time.monotonic() - started_s
            canceller.cancel()
            (num_blocks,) = outcome.num_blocks_of_run
            right = all(
                gather(taker.memory.groups[0], [Place(block_ids[at], 0, 2)]) == CONTENT[index]
                for at, index in enumerate(indexes[:num_blocks])
            )
            taker.reused(block_ids)
            with self._lock:
                name = outcome.error_type or "whole"
                self.outcomes[name] = self.outcomes.get(name, 0) + 1
                self.num_blocks += num_blocks
                self.longest_s = max(self.longest_s, seconds - timeout_s)
                if not right or (outcome.error is None) != (num_blocks == len(indexes)):
                    self.wrong.append(f"{indexes} from {address}: {outcome}")

    def evict_at_random(self) -> None:
        """Hand blocks out anew while they are read, write something else, and bring them back."""
        random = Random(f"{self._seed} evict")
        (group,) = self.server.memory.groups
        while not self.ended.wait(0.03):
            index = random.randrange(NUM_SHARED)
            block_id = BlockId(1 + index)
            self.server.reused([block_id])
            scatter(group, [Place(block_id, 0, 2)], random.randbytes(BLOCK_BYTES))
            scatter(group, [Place(block_id, 0, 2)], CONTENT[index])
            self.server.written(FIRST_GROUP, [(hash_of(index), block_id)])

    def facts(self) -> dict[str, Any]:
        services: list[WorkerService] = [self.server, *self.takers]
        with self._lock:
            return {
                "address": self.address,
                "outcomes": dict(self.outcomes),
                "num_blocks": self.num_blocks,
                "wrong": self.wrong[:3],
                "longest_s": self.longest_s,
                "rss": psutil.Process().memory_info().rss,
                "descriptors": psutil.Process().num_fds(),
                "threads": threading.active_count(),
                "in_progress": sum(
                    one.stats().of(direction).num_in_progress
                    for one in services
                    for direction in ("served", "pulled")
                ),
            }


def main() -> None:
    bulk_server.MIN_BULK_BYTES = 1
    soak = Soak(int(sys.argv[1]), int(sys.argv[2]))
    threads = [
        threading.Thread(target=soak.pull_at_random, args=(number,))
        for number in range(NUM_PULLING)
    ]
    threads.append(threading.Thread(target=soak.evict_at_random))
    for thread in threads:
        thread.start()
    print(json.dumps(soak.facts()), flush=True)
    for line in sys.stdin:
        command, _, rest = line.partition(" ")
        if command == "peers":
            soak.peers = [(address, incarnation) for address, incarnation in json.loads(rest)]
        elif command == "end\n":
            soak.ended.set()
            for thread in threads:
                thread.join()
        print(json.dumps(soak.facts()), flush=True)
    for one in (soak.server, *soak.takers):
        one.stop()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
