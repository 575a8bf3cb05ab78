"""Many seeds over several processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvferry.cluster.sim.shard import Shard
from kvferry.proto.errors import InvariantError

HASH_SEED = "0"

MAX_SEEDS = 250
"""So many in one process: what a killed task of one held, some 2 MiB a seed, stays in memory."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What many runs came to; `violations` tell of those that failed."""

    num_ran: int = 0
    num_steps: int = 0
    num_right: int = 0
    num_given_up: int = 0
    num_failed: int = 0
    num_crashes: int = 0
    num_restarts: int = 0
    num_renewals: int = 0
    num_sharded_lives: int = 0
    num_suspects: int = 0
    num_deaths: int = 0
    num_drains: int = 0
    num_drained_blocks: int = 0
    num_warmed_blocks: int = 0
    num_saves: int = 0
    num_resets: int = 0
    num_loaded_blocks: int = 0
    remote_hit_tokens: int = 0
    virtual_s: float = 0.0
    violations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        """Take in what one run came to."""
        self.num_ran += 1
        self.num_steps += result["num_steps"]
        self.num_right += result["num_right"]
        self.num_given_up += result["num_given_up"]
        self.num_failed += len(result["failures"])
        self.num_crashes += result["num_crashes"]
        self.num_restarts += result["num_restarts"]
        self.num_renewals += result["num_renewals"]
        self.num_sharded_lives += result["num_sharded_lives"]
        self.num_suspects += result["num_suspects"]
        self.num_deaths += result["num_deaths"]
        self.num_drains += result["num_drains"]
        self.num_drained_blocks += result["num_drained_blocks"]
        self.num_warmed_blocks += result["num_warmed_blocks"]
        self.num_saves += result["num_saves"]
        self.num_resets += result["num_resets"]
        self.num_loaded_blocks += result["num_loaded_blocks"]
        self.remote_hit_tokens += result["remote_hit_tokens"]
        self.virtual_s += result["virtual_s"]
        if result["violation"] is not None:
            self.violations.append(result)


def run_shards(
    *, seed: int, count: int, steps: int, profile: str, jobs: int, told: Callable[[Report], None]
) -> Report:
    """Run `count` seeds from `seed` on, over `jobs` processes; `told` hears of each that ended.

    Raises:
        InvariantError: a process ended before its seeds did.
    """
    report = Report()
    # Each process has as many as the others, and all profiles.
    num_shards = jobs * -(-count // (jobs * MAX_SEEDS))
    shards = [
        Shard(seeds=range(seed + index, seed + count, num_shards), steps=steps, profile=profile)
        for index in range(min(num_shards, count))
    ]
    with ThreadPoolExecutor(jobs) as readers, ExitStack() as running:
        ends = [readers.submit(_run, shard, running, report, told) for shard in shards]
        try:
            for ended in as_completed(ends):
                ended.result()
        finally:
            readers.shutdown(wait=False, cancel_futures=True)
    if report.num_ran != count:
        raise InvariantError(
            "a process of the simulator ended early", given=report.num_ran, allowed=count
        )
    report.violations.sort(key=lambda result: int(result["seed"]))
    return report


def _run(shard: Shard, running: ExitStack, report: Report, told: Callable[[Report], None]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry.cluster.sim.shard", *shard.to_arguments()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"},
    )
    running.callback(process.kill)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            report.add(json.loads(line))
            told(report)
