"""The simulator as people run it: `kvferry sim`."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.sim.mutations import MUTATIONS, mutated_sources, seed_that_notices

NUM_SEEDS, STEPS = 200, 2000
NUM_LONG_SEEDS = int(os.environ.get("KVFERRY_SIM_SEEDS", "5000"))


def run_sim(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "kvferry.cluster.cli", "sim", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ran.returncode == exit_code, ran.stdout
    shown: dict[str, Any] = json.loads(ran.stdout)
    return shown


@pytest.mark.timeout(900)
def test_200_seeds_of_2000_steps_violate_nothing() -> None:
    shown = run_sim("--count", str(NUM_SEEDS), "--steps", str(STEPS))
    assert (shown["ran"], shown["ok"], shown["violations"]) == (NUM_SEEDS, True, [])
    assert shown["num_steps"] >= NUM_SEEDS * STEPS
    # Otherwise nothing was tried.
    assert shown["requests"]["right"] > 10 * NUM_SEEDS
    assert shown["remote_hit_tokens"] > 50 * NUM_SEEDS
    assert shown["num_crashes"] > NUM_SEEDS // 4
    assert shown["num_coordinator_restarts"] > NUM_SEEDS // 4
    assert shown["num_new_weights"] > NUM_SEEDS // 4
    assert shown["num_sharded_lives"] > NUM_SEEDS
    assert shown["num_suspects"] > NUM_SEEDS // 20
    assert shown["num_deaths"] > 0
    assert shown["num_drains"] > NUM_SEEDS // 4
    assert shown["num_drained_blocks"] > NUM_SEEDS // 2
    assert shown["num_warmed_blocks"] > NUM_SEEDS
    assert shown["stores"]["loaded_blocks"] > 10 * NUM_SEEDS


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_seeds_of_2000_steps_violate_nothing_in_an_hour(
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = time.monotonic()
    shown = run_sim("--seed", "1000", "--count", str(NUM_LONG_SEEDS), "--steps", str(STEPS))
    with capsys.disabled():
        print(
            f"\n{shown['ran']} seeds, {shown['num_steps']} steps, {shown['requests']} in "
            f"{time.monotonic() - started:.0f} s on {os.cpu_count()} cores"
        )
    assert (shown["ran"], shown["ok"], shown["violations"]) == (NUM_LONG_SEEDS, True, [])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MUTATIONS)
def test_code_without_one_of_its_guards_is_noticed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    noticed = seed_that_notices(MUTATIONS[name])
    with capsys.disabled():
        print(f"\n{name}: {noticed}")
    assert noticed is not None


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_guard_that_is_dropped_is_still_where_it_is_looked_for(name: str) -> None:
    assert mutated_sources(MUTATIONS[name])


def test_a_seed_decides_everything() -> None:
    arguments = ("--seed", "3", "--steps", "1500", "--profile", "all")
    assert run_sim(*arguments) == run_sim(*arguments)


def test_the_first_lines_of_the_answer_say_how_to_repeat_it() -> None:
    shown = run_sim("--seed", "5", "--steps", "300")
    assert list(shown)[:2] == ["seed", "steps"]
    assert (shown["seed"], shown["steps"], shown["ok"], shown["repeat"]) == (5, 300, True, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "stormy"), "no such profile"),
        (("--steps", "0"), "--steps must be positive"),
        (("--count", "0"), "--count must be positive"),
        (("--seed", "-1"), "--seed must not be negative"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, ...], message: str) -> None:
    assert run_sim(*arguments, exit_code=2)["error"]["message"] == message
