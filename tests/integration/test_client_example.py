"""The example as its reader runs it: a service and two engines, each command a process."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_engines_of_the_example_agree_across_processes(tiny_model: Path) -> None:
    store = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "store_service.py"), "--model", str(tiny_model)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert store.stdout is not None
        words = store.stdout.readline().split()
        assert words[:2] == ["control", "front:"]
        command = [sys.executable, str(EXAMPLES / "prefix_sharing.py"), "--address", words[2]]
        example = subprocess.run(
            [*command, "--model", str(tiny_model)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        store.terminate()
        store.communicate(timeout=30)

    lines = example.stdout.splitlines()
    assert example.returncode == 0, example.stderr
    assert lines[0].startswith("engine A: computed 2471 tokens")
    assert lines[0].endswith("2464 are held")
    assert lines[1].startswith("engine B: fetched 2464 of 2529 tokens;")
    assert lines[-1] == "the answers are equal"
    assert store.returncode == 0
