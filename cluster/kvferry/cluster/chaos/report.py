"""What a chaos run prints: one JSON object, or tables."""

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cluster.chaos.counts import Counts, differences
from kvferry.cluster.chaos.faults import Fault, FaultKind
from kvferry.cluster.chaos.plan import ChaosPlan
from kvferry.cluster.chaos.traffic import Difference, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that happened.

    `recovery_s`: seconds from the kill, or from the end of the pause, until every node and
    instance lived and served; None if they did not in time.
    """

    fault: Fault
    victim: str
    recovery_s: float | None

    def __str__(self) -> str:
        after = "not recovered"
        if self.recovery_s is not None:
            after = f"recovered after {self.recovery_s:.1f} s"
        paused = f" for {self.fault.pause_s:g} s" if self.fault.is_pause else ""
        return f"{self.fault.kind}{paused}: {self.victim}: {after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosResult:
    """Everything that a run has seen.

    `end` is None if the coordinator did not answer any more. `wrong` are those of the differing
    outputs that no near tie explains.
    """

    plan: ChaosPlan
    tally: Tally
    struck: tuple[Struck, ...]
    start: Counts
    end: Counts | None
    wrong: tuple[Difference, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What should not have been, a sentence each."""
        found = [f"wrong output {one.output} instead of {one.expected}" for one in self.wrong]
        if not self.tally.served:
            found.append("no request was served")
        if not self.struck:
            found.append("no fault came")
        if not self.start.is_at_rest:
            found.append("before the first fault, something was held for somebody")
        found += [f"nothing is known of what {kind} used" for kind in self.start.unknown]
        found += self.tally.unclear
        found += [str(one) for one in self.struck if one.recovery_s is None]
        if self.end is None:
            found.append("the coordinator did not answer any more")
        else:
            found += differences(self.start, self.end)
        return tuple(found)


def to_json(result: ChaosResult) -> dict[str, Any]:
    """Return the object that `kvferry chaos --json` prints; times in seconds, memory in bytes."""
    tally = result.tally
    return {
        "minutes": result.plan.minutes,
        "seed": result.plan.seed,
        "requests": {
            "served": tally.served,
            "given_up": tally.given_up,
            "failed": dict(tally.failed),
            "retried": tally.retried,
            "unclear": len(tally.unclear),
            "near_ties": len(tally.differences) - len(result.wrong),
            "wrong": len(result.wrong),
        },
        "tokens": {
            "local_hit": tally.local_hit_tokens,
            "remote_hit": tally.remote_hit_tokens,
            "computed": tally.computed_tokens,
        },
        "faults": {kind: _faults(result, kind) for kind in result.plan.kinds},
        "counts": {
            "start": asdict(result.start),
            "end": None if result.end is None else asdict(result.end),
        },
        "problems": list(result.problems),
        "ok": not result.problems,
        "repeat": result.plan.command,
    }


def _faults(result: ChaosResult, kind: FaultKind) -> dict[str, Any]:
    struck = [one for one in result.struck if one.fault.kind == kind]
    times_s = [one.recovery_s for one in struck if one.recovery_s is not None]
    recovery_s = None
    if times_s:
        recovery_s = {
            "min": round(min(times_s), 2),
            "median": round(median(times_s), 2),
            "max": round(max(times_s), 2),
        }
    return {
        "count": len(struck),
        "victims": dict(Counter(one.victim for one in struck)),
        "recovery_s": recovery_s,
    }


def print_tables(result: ChaosResult, out: Console) -> None:
    """Print the same for people."""
    shown = to_json(result)
    faults = Table("fault", "count", "recovered after (median)", "at most", box=SIMPLE_HEAD)
    for kind, one in shown["faults"].items():
        times = one["recovery_s"]
        faults.add_row(
            kind,
            str(one["count"]),
            f"{times['median']:.1f} s" if times else "",
            f"{times['max']:.1f} s" if times else "",
        )
    counts = Table("at rest", "before", "after", box=SIMPLE_HEAD)
    end = shown["counts"]["end"] or {}
    for name, before in shown["counts"]["start"].items():
        counts.add_row(name, _cell(before), _cell(end.get(name, "unknown")))
    out.print(faults, counts)
    out.print(str(result.tally), markup=False, soft_wrap=True)
    for problem in result.problems:
        out.print(problem, markup=False, soft_wrap=True)
    out.print(
        f"ok: {result.plan.command}" if shown["ok"] else f"failed: {result.plan.command}",
        markup=False,
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{number} {name}" for name, number in value.items())
    return str(value)
