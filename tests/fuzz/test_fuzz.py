"""Damaged messages, each to what reads it in production: a right result or a clean error, no more.

No network; `test_fuzz_network.py` has one. Each case has its own seed, which a failure names:
`run("fetch 17", named)` plays it again.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import psutil
import pytest
from tests.arenas import needs_arenas
from tests.fuzz import control_targets
from tests.fuzz.client_targets import Receiver
from tests.fuzz.server_targets import Front

pytestmark = needs_arenas

Target = Callable[[Random], None]

# How many of a hundred cases each gets.
SHARE = {
    "fetch": 18,
    "put": 10,
    "take": 4,
    "describe": 2,
    "in_the_call": 18,
    "from_memory": 8,
    "by_bulk": 12,
    "attach": 6,
    "error": 4,
    "description": 4,
    "packed": 7,
    "protobuf": 7,
}
MIB = 1 << 20
BOUND_BYTES = 64 * MIB
"""What a process may have grown by, at any time, that takes messages of 64 KiB at most."""


@contextmanager
def targets() -> Iterator[dict[str, Target]]:
    front, receiver = Front(), Receiver()
    both: list[Target] = [
        front.fetch,
        front.put,
        front.take,
        front.describe,
        receiver.in_the_call,
        receiver.from_memory,
        receiver.by_bulk,
        receiver.attach,
        receiver.error,
        receiver.description,
        control_targets.packed,
        control_targets.protobuf,
    ]
    try:
        front.require_as_before()
        receiver.require_as_before()
        yield {target.__name__: target for target in both}
        front.require_as_before()
        receiver.require_as_before()
    finally:
        front.stop()
        receiver.stop()


def run(seed: str, named: dict[str, Target]) -> None:
    """Play one case; its seed is the target's name and a number."""
    try:
        named[seed.split(maxsplit=1)[0]](Random(seed))
    except Exception as error:
        raise AssertionError(f"seed {seed!r} ended in {type(error).__name__}") from error


def run_all(num_hundreds: int) -> None:
    """Play so many hundreds of cases; memory, descriptors and threads must be what they were."""
    this = psutil.Process()
    with targets() as named:
        for name, share in SHARE.items():
            for number in range(share):  # first calls need memory, descriptors and threads once
                run(f"{name} warm-up {number}", named)
        held = this.num_fds(), threading.active_count()
        before = peak_bytes()
        for name, share in SHARE.items():
            for number in range(share * num_hundreds):
                run(f"{name} {number}", named)
        assert peak_bytes() - before < BOUND_BYTES
        assert (this.num_fds(), threading.active_count()) == held


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def in_a_fresh_process(num_hundreds: int) -> None:
    """Peaks of memory are those of a whole process, and cannot be set back everywhere."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.fuzz.test_fuzz import run_all; run_all({num_hundreds})",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_damaged_messages_end_in_right_bytes_or_a_clean_error_within_bounds() -> None:
    assert sum(SHARE.values()) == 100
    in_a_fresh_process(20)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_100_000_damaged_messages_end_in_right_bytes_or_a_clean_error_within_bounds() -> None:
    in_a_fresh_process(1_000)
