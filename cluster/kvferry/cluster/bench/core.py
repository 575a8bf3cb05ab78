"""All figures of the core, one after the other."""

from collections.abc import Iterator
from contextlib import ExitStack

from kvferry.cluster.bench.hash_rows import hash_rows
from kvferry.cluster.bench.index_rows import ingest_rows, locate_rows
from kvferry.cluster.bench.pool_rows import memory_rows, pool_rows
from kvferry.cluster.bench.report import describe_machine
from kvferry.cluster.bench.restore_rows import restore_rows
from kvferry.cluster.bench.rows import Row
from kvferry.cluster.bench.vllm_process import VllmProcess, running_vllm
from kvferry.cluster.progress import Progress


def bench_core(
    *, seconds: float, vllm_python: str | None, progress: Progress
) -> tuple[dict[str, object], list[Row]]:
    """Measure everything and return the machine and the rows.

    Args:
        seconds: time per figure (or pair of figures that are measured together).
        vllm_python: an interpreter that has vLLM; None leaves its rows out.
        progress: takes a line per figure.

    Raises:
        ConfigError: `vllm_python` cannot be used.
        UnavailableError, DeadlineError: Ray or vLLM does not answer.
        InvariantError: what is timed does not do what it should.
    """
    with ExitStack() as stack:
        vllm = None
        if vllm_python is not None:
            progress(f"starting vLLM in {vllm_python}")
            vllm = stack.enter_context(running_vllm(vllm_python))
        rows = []
        for row in _all_rows(seconds, vllm):
            ratio = "" if row.ratio is None else f", {row.ratio:.3f} of {row.baseline}"
            progress(f"{row.name}: {row.value:,.1f} {row.unit}{ratio}")
            rows.append(row)
        return describe_machine(vllm.version if vllm else None), rows


def _all_rows(seconds: float, vllm: VllmProcess | None) -> Iterator[Row]:
    from kvferry.cluster.ray_bench import step_rows  # the rest loads without Ray

    yield from hash_rows(seconds)
    if vllm is not None:
        yield from pool_rows(vllm, seconds)
        yield from memory_rows(vllm)
    yield from locate_rows(seconds)
    yield from ingest_rows(seconds)
    yield from restore_rows(seconds)
    yield from step_rows(seconds)
