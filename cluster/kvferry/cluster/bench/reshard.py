"""All figures of moving cached tokens between layouts, one after the other."""

from itertools import chain

from kvferry.cluster.bench.move_rows import move_rows
from kvferry.cluster.bench.plan_rows import plan_rows
from kvferry.cluster.bench.report import describe_machine
from kvferry.cluster.bench.rows import Row
from kvferry.cluster.progress import Progress


def bench_reshard(*, seconds: float, progress: Progress) -> tuple[dict[str, object], list[Row]]:
    """Measure everything and return the machine and the rows.

    Args:
        seconds: time per figure.
        progress: takes a line per figure.

    Raises:
        InvariantError: what is timed does not do what it should.
    """
    rows = []
    for row in chain(move_rows(seconds), plan_rows(seconds)):
        ratio = "" if row.ratio is None else f", {row.ratio:.3f} of {row.baseline}"
        progress(f"{row.name}: {row.value:,.3f} {row.unit}{ratio}")
        rows.append(row)
    return describe_machine(None), rows
