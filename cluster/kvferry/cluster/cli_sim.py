"""`kvferry sim`: options, and what is printed where."""

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvferry.proto.errors import BadInputError, ConfigError

if TYPE_CHECKING:
    from kvferry.cluster.sim.shards import Report

EXAMPLES = """
Examples:

kvferry sim --seed 7                              one run

kvferry sim --count 200 --json                    200 seeds over all cores, one JSON object

kvferry sim --seed 7 --steps 10000 --profile crashes
"""

Seed = Annotated[int, typer.Option(help="Decides everything in a run; the first of several.")]
Count = Annotated[int, typer.Option(help="How many seeds.")]
Steps = Annotated[int, typer.Option(help="Steps of a run in which things go wrong.")]
ProfileName = Annotated[
    str, typer.Option("--profile", help="calm, network, crashes, all; any: each seed has its own.")
]
Jobs = Annotated[int | None, typer.Option(help="Processes; by default one a core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def sim(
    *,
    seed: Seed = 0,
    count: Count = 1,
    steps: Steps = 2000,
    profile: ProfileName = "any",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> int:
    """Run the real services on virtual time, with faults, and check what must hold at every step.

    Exit code 1 if something was violated; what was is printed with the command that repeats it.
    """
    for name, value in (("count", count), ("steps", steps), ("jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise BadInputError(f"--{name} must be positive", given=value, allowed=">= 1")
    if seed < 0:
        raise BadInputError("--seed must not be negative", given=seed, allowed=">= 0")
    try:
        # Only now what imports torch, and what only the simulator needs.
        from kvferry.cluster.sim.shard import profile_of
        from kvferry.cluster.sim.shards import run_shards
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        raise ConfigError(
            "the simulator needs greenlet", allowed="pip install 'kvferry[sim]'"
        ) from error
    profile_of(seed, profile)
    with Progress(console=Console(stderr=True)) as progress:
        line = progress.add_task("seeds", total=count)
        report = run_shards(
            seed=seed,
            count=count,
            steps=steps,
            profile=profile,
            jobs=jobs or os.cpu_count() or 1,
            told=lambda now: progress.update(line, completed=now.num_ran),
        )
    shown = _to_json(report, seed=seed, count=count, steps=steps, profile=profile)
    if as_json:
        print(json.dumps(shown))
    else:
        _print(shown)
    return 1 if report.violations else 0


def _to_json(
    report: "Report", *, seed: int, count: int, steps: int, profile: str
) -> dict[str, Any]:
    violations = [
        {
            "seed": result["seed"],
            "profile": result["profile"],
            "violation": result["violation"],
            "repeat": f"kvferry sim --seed {result['seed']} --steps {steps} --profile {profile}",
        }
        for result in report.violations
    ]
    return {
        "seed": seed,
        "steps": steps,
        "profile": profile,
        "count": count,
        "ran": report.num_ran,
        "ok": not violations,
        "violations": violations,
        "repeat": violations[0]["repeat"] if violations else None,
        "num_steps": report.num_steps,
        "virtual_s": round(report.virtual_s, 1),
        "num_crashes": report.num_crashes,
        "num_coordinator_restarts": report.num_restarts,
        "num_new_weights": report.num_renewals,
        "num_sharded_lives": report.num_sharded_lives,
        "num_suspects": report.num_suspects,
        "num_deaths": report.num_deaths,
        "num_drains": report.num_drains,
        "num_drained_blocks": report.num_drained_blocks,
        "num_warmed_blocks": report.num_warmed_blocks,
        "requests": {
            "right": report.num_right,
            "given_up": report.num_given_up,
            "failed": report.num_failed,
        },
        "remote_hit_tokens": report.remote_hit_tokens,
        "stores": {
            "saves": report.num_saves,
            "loaded_blocks": report.num_loaded_blocks,
            "resets": report.num_resets,
        },
    }


def _print(shown: dict[str, Any]) -> None:
    out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    requests, stores = shown["requests"], shown["stores"]
    out.print(
        f"{shown['ran']} runs, {shown['num_steps']} steps, {shown['virtual_s']} virtual seconds, "
        f"{shown['num_crashes']} crashes, {shown['num_coordinator_restarts']} restarts of the "
        f"coordinator, {shown['num_new_weights']} times new weights, "
        f"{shown['num_sharded_lives']} lives of several ranks, {shown['num_suspects']} suspects "
        f"of whom {shown['num_deaths']} were taken for dead, {shown['num_drains']} drains by which "
        f"{shown['num_drained_blocks']} blocks moved, {shown['num_warmed_blocks']} to new members; "
        f"requests: {requests['right']} right, "
        f"{requests['given_up']} given up, {requests['failed']} failed; "
        f"{shown['remote_hit_tokens']} tokens came from peers; stores: {stores['saves']} saves, "
        f"{stores['loaded_blocks']} blocks loaded, {stores['resets']} resets"
    )
    for violation in shown["violations"]:
        out.print(f"seed {violation['seed']}: {violation['violation']}", markup=False)
        out.print(f"  {violation['repeat']}", markup=False)
    out.print("ok" if shown["ok"] else f"{len(shown['violations'])} runs failed")
