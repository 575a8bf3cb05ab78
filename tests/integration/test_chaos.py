"""`kvferry chaos` as a user runs it, for a minute."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
