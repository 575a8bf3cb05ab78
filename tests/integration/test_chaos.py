"""`kvferry chaos` as a user runs it, for a minute, and as one who stops it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

from kvferry.cluster.chaos import processes
from kvferry.cluster.chaos.faults import KINDS

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_minute_of_kills_and_pauses_gives_no_wrong_output_and_leaves_nothing_held(
    tiny_model: Path,
) -> None:
    words = ["chaos", "--minutes", "1", "--seed", "3", "--model", str(tiny_model), "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry.cluster.cli", *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    shown = json.loads(ended.stdout)
    assert (shown["problems"], shown["ok"], ended.returncode) == ([], True, 0), ended.stderr
    assert shown["requests"]["served"] > 54  # once everything, at the end
    assert shown["tokens"]["remote_hit"] > 0
    assert sum(one["count"] for one in shown["faults"].values()) > 0
    assert set(shown["faults"]) == set(KINDS)


def test_an_interrupt_during_a_fault_ends_it_with_130_and_leaves_no_process(
    tiny_model: Path,
) -> None:
    words = ["chaos", "--only", "pause_node", "--model", str(tiny_model), "--json"]
    # As with Ctrl-C in a terminal, everybody in its session's group gets the signal.
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry.cluster.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            assert running.stderr is not None
            said = []
            for line in running.stderr:
                said.append(line)
                if "pause_node: node-" in line:
                    break
            main = processes.find(running.pid)
            assert main is not None, said
            family = processes.family(main)
            os.killpg(running.pid, signal.SIGINT)
            out, _ = running.communicate(timeout=120)
        finally:
            running.kill()
    assert json.loads(out)["error"]["type"] == "Interrupted"
    assert running.returncode == 130
    assert len(family) > 10  # a head, three nodes, and what runs there
    wait_until(lambda: not any(map(processes.lives, family)), 10.0)
