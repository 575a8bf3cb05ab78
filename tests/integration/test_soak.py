"""Workers that pull from one another at random while one of them is killed every minute.

`KVFERRY_SOAK_S` is how long, in seconds; a tenth of that passes between two kills.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PEER = Path(__file__).with_name("soak_peer.py")
MIB = 1 << 20
DURATION_S = float(os.environ.get("KVFERRY_SOAK_S", "600"))
NUM_STEADY = 2
SEED = 1

# What allocators and gRPC keep or not from one moment to the next.
MEMORY_SLACK_BYTES = 24 * MIB
# A connection or two per peer come and go with it; so do the threads of calls under way.
DESCRIPTOR_SLACK = 12
THREAD_SLACK = 12
# A pull is over so soon after its deadline, also on a machine that does much else.
LATE_S = 2.0


class Peer:
    """One process of the soak."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(incarnation), str(SEED + incarnation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.address = self._answer()["address"]

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        facts: dict[str, Any] = json.loads(self.process.stdout.readline())
        return facts


@contextmanager
def peers() -> Iterator[list[Peer]]:
    """Some that live to the end, and a last one to be killed."""
    running: list[Peer] = []
    try:
        running.extend(Peer(1 + number) for number in range(NUM_STEADY + 1))
        yield running
    finally:
        for peer in running:
            peer.kill()


def introduce(running: Sequence[Peer]) -> None:
    for one in running:
        others = [(peer.address, peer.incarnation) for peer in running if peer is not one]
        one.ask("peers " + json.dumps(others))


@pytest.mark.long
@pytest.mark.timeout(DURATION_S + 120)
def test_random_transfers_with_a_killed_peer_a_minute_leave_nothing_behind() -> None:
    with peers() as running:
        introduce(running)
        steady, begun_s = running[:NUM_STEADY], time.monotonic()
        before: list[dict[str, Any]] = []
        for minute in range(1, 11):
            time.sleep(max(0.0, begun_s + minute * DURATION_S / 10 - time.monotonic()))
            running.pop().kill()
            running.append(Peer(100 + minute))
            introduce(running)
            facts = [peer.ask("facts") for peer in steady]
            print(minute, facts, flush=True)
            if minute == 2:
                before = facts
        after = [peer.ask("facts") for peer in steady]
        ended = [peer.ask("end") for peer in steady]

    for early, late, end in zip(before, after, ended, strict=True):
        assert end["wrong"] == []
        assert end["longest_s"] < LATE_S
        assert end["outcomes"]["whole"] > early["outcomes"]["whole"]
        assert late["rss"] - early["rss"] < MEMORY_SLACK_BYTES
        assert late["descriptors"] - early["descriptors"] < DESCRIPTOR_SLACK
        assert late["threads"] - early["threads"] < THREAD_SLACK
