"""Whom the faults of a chaos run hit: processes, and what Linux tells of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.cluster.test_chaos import description, make_fault

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.counts import kind_of
from kvferry.cluster.chaos.strikes import Target, strike, target_of


@pytest.fixture
def child(tmp_path: Path) -> Iterator[processes.Process]:
    """A process that writes below a folder, and sleeps."""
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=log)
    found = processes.find(child.pid)
    assert found is not None
    yield found
    child.kill()
    child.communicate(timeout=10)


def state_of(pid: int) -> str:
    found = processes.find(pid)
    return "gone" if found is None else found.state


async def until_state(pid: int, states: str) -> None:
    async with asyncio.timeout(10):
        while state_of(pid) not in states:
            await asyncio.sleep(0.005)


def test_a_process_is_found_by_the_folder_it_writes_to_and_as_a_child(
    child: processes.Process, tmp_path: Path
) -> None:
    assert [one.pid for one in processes.using(tmp_path)] == [child.pid]
    assert processes.using(tmp_path / "log") == ()
    own = processes.find(os.getpid())
    assert own is not None
    assert own.is_running
    assert child.pid in [one.pid for one in processes.family(own)]
    used = processes.usage(child.pid)
    assert used is not None
    assert used.files >= 3
    assert used.sockets == 0
    assert used.memory_bytes > 1 << 20


def test_a_signal_reaches_the_process_and_no_later_one_of_its_id(
    child: processes.Process,
) -> None:
    processes.send(replace(child, started=child.started - 1), signal.SIGKILL)
    fault = make_fault("pause_node")
    target = target_of(fault, description(), {"node-1": child}, Path("nowhere"))
    assert target.name == "node-1"
    assert [one.pid for one in target.hit] == [child.pid]

    async def pause_and_kill() -> None:
        pausing = asyncio.create_task(strike(fault, target))
        await until_state(child.pid, "T")
        await pausing
        await until_state(child.pid, "SR")
        await strike(make_fault("kill_node"), target)
        await until_state(child.pid, "Z")

    asyncio.run(pause_and_kill())


def test_whatever_writes_below_a_folder_can_be_ended(
    child: processes.Process, tmp_path: Path
) -> None:
    processes.end_all(tmp_path)
    asyncio.run(until_state(child.pid, "Z"))


def test_a_kill_hits_the_victim_and_ends_whatever_needs_it(child: processes.Process) -> None:
    own = processes.find(os.getpid())
    assert own is not None

    def target(kind: str) -> Target:
        told = description(rank_pids=(child.pid,))
        return target_of(make_fault(kind), told, {"node-1": own}, Path("nowhere"))

    instance, raylet, node = map(target, ("kill_instance", "kill_raylet", "kill_node"))
    assert (instance.name, pids(instance.hit), pids(instance.ends)) == (
        "decode-0",
        {child.pid},
        {child.pid},
    )
    assert (raylet.name, pids(raylet.hit)) == ("node-1", {own.pid})
    assert pids(raylet.ends) == pids(node.hit) == pids(node.ends) >= {own.pid, child.pid}
    assert target("pause_node").ends == ()
    assert target("kill_coordinator").hit == ()


def pids(found: tuple[processes.Process, ...]) -> set[int]:
    return {one.pid for one in found}


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::RankActor.outputs", "RankActor"),
        ("ray::RayCoordinatorActor", "RayCoordinatorActor"),
        ("ray::IDLE", ""),
        ("/x/ray/core/src/ray/raylet/raylet --worker=/y/setup_worker.py", "raylet"),
        ("/x/bin/python3 -u /y/log_monitor.py --z", "log_monitor"),
    ],
)
def test_a_cluster_s_processes_are_told_apart_by_their_titles(title: str, kind: str) -> None:
    assert kind_of(title) == kind
