import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.worker import host_memory

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("line", "limits", "expected_mib"),
    [
        # Version 2, as a process outside containers sees it: the least of all around it counts.
        ("0::/a/b", {"memory.max": "max", "a/memory.max": "7340032", "a/b/memory.max": "max"}, 7),
        ("0::/a/b", {"a/memory.max": "7340032", "a/b/memory.max": "5242880"}, 5),
        # In a container the mount begins at its own group, whatever the path says.
        ("0::/", {"memory.max": "7340032"}, 7),
        ("4:cpu,memory:/x/y", {"memory/memory.limit_in_bytes": "7340032"}, 7),
        ("4:memory:/../x", {"memory/memory.limit_in_bytes": "7340032"}, 7),
    ],
)
def test_the_least_limit_of_the_control_groups_bounds_the_memory(
    tmp_path: Path, line: str, limits: dict[str, str], expected_mib: int
) -> None:
    proc = _proc(tmp_path, f"9:pids:/p\n{line}\n")
    for name, text in limits.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert host_memory.total_bytes(proc, tmp_path / "cgroup") == expected_mib * MIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (machine_kib,) = (
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    found = host_memory.total_bytes(_proc(tmp_path, "0::/\n"), tmp_path)
    assert found == pytest.approx(machine_kib * 1024, rel=0.02)


# In a process of its own: where the kernel does not begin a peak anew (some sandboxes), the peak
# would be that of all tests before, and nothing here would exceed it.
PEAKS = """
import numpy as np
from kvferry.worker import host_memory
MIB = 1024 * 1024
kept = np.ones(64 * MIB, dtype=np.uint8)
print(host_memory.peak_resident_bytes(lambda: None))
print(host_memory.peak_resident_bytes(lambda: np.ones(96 * MIB, dtype=np.uint8)))
print(host_memory.peak_resident_bytes(lambda: None))
"""


@pytest.fixture(scope="module")
def peaks() -> list[int]:
    done = subprocess.run([sys.executable, "-c", PEAKS], check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def test_the_peak_counts_what_was_there_before_and_what_is_gone_again(peaks: list[int]) -> None:
    before, during, _ = peaks
    assert before > 64 * MIB
    assert 90 * MIB < during - before < 104 * MIB


def test_a_peak_that_is_over_is_forgotten_where_the_kernel_can(peaks: list[int]) -> None:
    before, during, after = peaks
    if after == during:
        pytest.skip("this kernel does not begin a peak anew, so the one there was counts")
    assert abs(after - before) < 16 * MIB


def test_where_the_peak_cannot_be_begun_anew_the_one_there_is_counts(tmp_path: Path) -> None:
    proc = _proc(tmp_path, "")
    (proc / "self" / "clear_refs").mkdir()  # not to be written to
    (proc / "self" / "status").write_text("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n")
    assert host_memory.peak_resident_bytes(lambda: None, proc) == 2 * MIB


def _proc(folder: Path, cgroup: str) -> Path:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc
