"""`kvferry bench core` as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_the_core_is_measured_and_one_json_object_printed() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvferry.cluster.cli",
            "bench",
            "core",
            "--json",
            "--seconds",
            "0.01",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    result = json.loads(done.stdout)
    assert set(result) == {"machine", "rows"}
    assert result["machine"]["vllm"] is None
    assert [(row["name"], row["baseline"]) for row in result["rows"]] == [
        ("hash_block@list", "naive"),
        ("hash_block@array", "naive"),
        ("locate_block@1", "dict"),
        ("locate_block@64", "dict"),
        ("locate_block@1024", "dict"),
        ("ingest_event", None),
        ("restore_1000000", None),
        ("step_call@256", "empty_call"),
    ]
    for row in result["rows"]:
        assert set(row) == {
            "name", "unit", "value", "baseline", "baseline_value", "ratio", "better"
        }  # fmt: skip
        assert f"{row['name']}: " in done.stderr
