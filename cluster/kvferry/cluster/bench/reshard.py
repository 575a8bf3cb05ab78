"""All figures of moving cached tokens between layouts, one after the other."""

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
    for row in plan_rows(seconds):
        progress(f"{row.name}: {row.value:,.3f} {row.unit}")
        rows.append(row)
    return describe_machine(None), rows
