"""`kvferry chaos`: options, and what is printed where."""

import contextlib
import json
import math
import sys
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cluster import ray_environment
from kvferry.cluster.chaos.faults import KINDS, FaultKind
from kvferry.cluster.chaos.plan import ChaosPlan
from kvferry.cluster.cli_options import AsJson
from kvferry.cluster.progress import stderr_progress
from kvferry.proto.errors import BadInputError, ConfigError

EXAMPLES = """
Examples:

kvferry chaos                                              two minutes of all faults, tables

kvferry chaos --minutes 10 --seed 7 --json                 one JSON object on stdout

kvferry chaos --only kill_coordinator --only pause_node    these faults and no others
"""

Minutes = Annotated[float, typer.Option(help="Minutes of faults; start and end come on top.")]
Seed = Annotated[int, typer.Option(help="Decides what is asked and which faults come.")]
Model = Annotated[
    str, typer.Option(help="Folder or hub id of a Hugging Face model; by default the demo's.")
]
Only = Annotated[
    list[str] | None, typer.Option(help=f"A kind of fault: {', '.join(KINDS)}; may be repeated.")
]


def chaos(
    *,
    minutes: Minutes = 2.0,
    seed: Seed = 0,
    model: Model = "",
    only: Only = None,
    as_json: AsJson = False,
) -> int:
    """Kill and stop processes of a real service, and compare with an undisturbed run.

    Starts a Ray cluster of several nodes on this machine. Exit code 1 if an output was wrong, a
    request was lost, or something has not come back to what it was before.
    """
    if not (math.isfinite(minutes) and minutes > 0):
        raise BadInputError("--minutes must be positive", given=minutes, allowed="> 0")
    if seed < 0:
        raise BadInputError("--seed must not be negative", given=seed, allowed=">= 0")
    if not sys.platform.startswith("linux"):
        raise ConfigError("chaos needs /proc", given=sys.platform, allowed="linux")
    kinds = _kinds(only or [])
    plan = ChaosPlan(minutes=minutes, seed=seed, model=model, kinds=kinds)
    ray_environment.prepare("local")
    # Only now what imports Ray, and takes seconds to import.
    from kvferry.cluster.chaos.report import print_tables, to_json
    from kvferry.cluster.chaos.run import run_chaos
    from kvferry.worker.model.demo_model import ensure_demo_model

    progress = stderr_progress()
    # Ray tells of dead workers on stdout, which belongs to the results.
    with contextlib.redirect_stdout(sys.stderr):
        folder = model or str(ensure_demo_model(progress=progress))
        result = run_chaos(folder, plan, progress)
    if as_json:
        print(json.dumps(to_json(result)))
    else:
        print_tables(result, Console(file=sys.stdout, highlight=False))
    return 1 if result.problems else 0


def _kinds(names: list[str]) -> tuple[FaultKind, ...]:
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise BadInputError("no such fault", given=unknown, allowed=list(KINDS))
    return tuple(kind for kind in KINDS if not names or kind in names)
