"""What a benchmark prints: one JSON object, or a table; and the machine it ran on."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cluster.bench.rows import Row

_PACKAGES = ("kvferry", "cbor2", "numpy", "ray")


def describe_machine(vllm_version: str | None) -> dict[str, Any]:
    """Return what the figures depend on besides the code."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "vllm": vllm_version,
    }


def to_json(machine: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the object that `kvferry bench ... --json` prints."""
    return {"machine": machine, "rows": [row.to_json() for row in rows]}


def print_table(machine: dict[str, Any], rows: Sequence[Row], console: Console) -> None:
    """Print one line per row, and the machine below."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("name")
    for heading in ("value", "baseline", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("better")
    for row in rows:
        baseline = "" if row.baseline_value is None else f"{row.baseline} {row.baseline_value:,.1f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.name, f"{row.value:,.1f} {row.unit}", baseline, ratio, row.better)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items() if value))
