"""`kvferry bench`: options, and what is printed where."""

import contextlib
import json
import math
import sys
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cluster import ray_environment
from kvferry.cluster.bench.report import print_table, to_json
from kvferry.cluster.bench.rows import Row
from kvferry.cluster.progress import stderr_progress
from kvferry.proto.errors import ConfigError

TABLE_COLUMNS = 110
EXAMPLES = """
Examples:

kvferry bench core                                        a table

kvferry bench core --json > core.json                     one JSON object on stdout

kvferry bench core --vllm-python vllm/bin/python          beside vLLM's own cache manager

kvferry bench reshard                                     moving between layouts

kvferry bench transfer                                    blocks from one process to another
"""

app = typer.Typer(
    help="Measure, each figure beside its baseline.", no_args_is_help=True, add_completion=False
)

Seconds = Annotated[float, typer.Option(help="Time per figure; at least 15 pairs are measured.")]
VllmPython = Annotated[
    str | None,
    typer.Option(
        help="A Python that has vLLM 0.32; without it the rows against vLLM are left out."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command("core", epilog=EXAMPLES)
def core(*, seconds: Seconds = 1.0, vllm_python: VllmPython = None, as_json: AsJson = False) -> int:
    """Measure hashing, block pool, location index and the engine's step call.

    Starts a local Ray cluster for the step call, and stops it.
    """
    _require_positive(seconds)
    ray_environment.prepare("local")
    # Only now what imports Ray, and takes seconds to import.
    from kvferry.cluster.bench.core import bench_core

    progress = stderr_progress()
    # Ray tells of dead workers on stdout, which belongs to the results.
    with contextlib.redirect_stdout(sys.stderr):
        machine, rows = bench_core(seconds=seconds, vllm_python=vllm_python, progress=progress)
    return _show(machine, rows, as_json=as_json)


@app.command("reshard", epilog=EXAMPLES)
def reshard(*, seconds: Seconds = 1.0, as_json: AsJson = False) -> int:
    """Measure moving cached tokens from one layout to another."""
    _require_positive(seconds)
    # Only now what imports torch, likewise.
    from kvferry.cluster.bench.reshard import bench_reshard

    machine, rows = bench_reshard(seconds=seconds, progress=stderr_progress())
    return _show(machine, rows, as_json=as_json)


@app.command("transfer", epilog=EXAMPLES)
def transfer(*, seconds: Seconds = 1.0, as_json: AsJson = False) -> int:
    """Measure fetching blocks by hash from another process, by every path."""
    _require_positive(seconds)
    # Only now what imports torch, likewise.
    from kvferry.cluster.bench.transfer import bench_transfer

    machine, rows = bench_transfer(seconds=seconds, progress=stderr_progress())
    return _show(machine, rows, as_json=as_json)


def _require_positive(seconds: float) -> None:
    if not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError("--seconds must be positive", given=seconds, allowed="> 0")


def _show(machine: dict[str, object], rows: list[Row], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(to_json(machine, rows)))
    else:
        out = Console(file=sys.stdout, highlight=False)
        out.width = max(out.width, TABLE_COLUMNS)
        print_table(machine, rows, out)
    return 0
