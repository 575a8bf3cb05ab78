"""One measured figure beside its baseline, and how the two are measured: in interleaved pairs.

Whatever else the machine does then falls on both sides, so the ratio means something where the
values alone do not.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

MIN_PAIRS = 15
"""Fewest pairs of a row, however short the time."""

Better = Literal["lower", "higher"]
Work = Callable[[], float]
"""Does the work once and returns the figure of that one time, in the row's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    `unit`: ns (per block or call), ms, B (per block), GB/s, 1/s. `ratio` is
    `value / baseline_value`, the median over pairs. Without a baseline, `baseline`,
    `baseline_value` and `ratio` are None.
    """

    name: str
    unit: str
    value: float
    baseline: str | None
    baseline_value: float | None
    ratio: float | None
    better: Better

    def to_json(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON object."""
        return asdict(self)


def row_of_pairs(
    name: str,
    pairs: Sequence[tuple[float, float]],
    baseline: str,
    *,
    unit: str,
    better: Better = "lower",
) -> Row:
    """Return the row of `(value, baseline value)` pairs."""
    return Row(
        name=name,
        unit=unit,
        value=statistics.median(mine for mine, _ in pairs),
        baseline=baseline,
        baseline_value=statistics.median(other for _, other in pairs),
        ratio=statistics.median(mine / other for mine, other in pairs),
        better=better,
    )


def measure_pairs(
    name: str,
    ours: Work,
    baseline: str,
    theirs: Work,
    *,
    unit: str,
    seconds: float,
    better: Better = "lower",
) -> Row:
    """Return the row of two works that are done in turn for `seconds`, or `MIN_PAIRS` times."""
    pairs = [(ours(), theirs()) for _ in rounds(seconds)]
    return row_of_pairs(name, pairs, baseline, unit=unit, better=better)


def measure_alone(
    name: str,
    ours: Work,
    *,
    unit: str,
    better: Better,
    seconds: float,
    min_rounds: int = MIN_PAIRS,
) -> Row:
    """Return the row of a figure without baseline, of which there is no pair to be taken."""
    return Row(
        name=name,
        unit=unit,
        value=statistics.median(ours() for _ in rounds(seconds, min_rounds)),
        baseline=None,
        baseline_value=None,
        ratio=None,
        better=better,
    )


def elapsed_ns(work: Callable[[], object]) -> int:
    """Return how many nanoseconds one call takes."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def rounds(seconds: float, min_rounds: int = MIN_PAIRS) -> Iterator[int]:
    """Count until the time is over, at least `min_rounds` times."""
    deadline = time.monotonic() + seconds
    done = 0
    while done < min_rounds or time.monotonic() < deadline:
        yield done
        done += 1
