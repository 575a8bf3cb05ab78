"""A worker's statistics as Prometheus metrics."""

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvferry.worker.stats import TransferCounts, WorkerStats

Value = Callable[[TransferCounts], float]

_LABELS = ("direction", "path")
_COUNTERS: tuple[tuple[str, str, Value], ...] = (
    (
        "kvferry_transfers",
        "Transfers that have ended, failed ones included",
        lambda counts: counts.num_started - counts.num_in_progress,
    ),
    (
        "kvferry_transfer_bytes",
        "Block bytes moved, without envelopes",
        lambda counts: counts.num_bytes,
    ),
    (
        "kvferry_transfer_seconds",
        "Time that the transfers took that have ended",
        lambda counts: counts.seconds,
    ),
)


def worker_metrics(stats: WorkerStats, *, num_resident_blocks: int) -> Iterator[Metric]:
    """Yield what a rank's worker has moved and holds."""
    for name, meaning, value in _COUNTERS:
        counter = CounterMetricFamily(name, meaning, labels=_LABELS)
        for of, counts in stats.transfers.items():
            counter.add_metric(of, value(counts))
        yield counter
    failures = CounterMetricFamily(
        "kvferry_transfer_failures",
        "Transfers that ended before everything had moved",
        labels=(*_LABELS, "reason"),
    )
    in_progress = GaugeMetricFamily(
        "kvferry_transfers_in_progress", "Transfers under way", labels=_LABELS
    )
    for of, counts in stats.transfers.items():
        in_progress.add_metric(of, counts.num_in_progress)
        for reason, number in counts.failures.items():
            failures.add_metric((*of, reason), number)
    yield failures
    yield in_progress
    yield CounterMetricFamily(
        "kvferry_pulled_blocks", "Blocks pulled whole", value=stats.num_blocks_pulled
    )
    yield CounterMetricFamily(
        "kvferry_checksum_failures",
        "Received frames whose checksum was wrong",
        value=stats.num_checksum_failures,
    )
    yield GaugeMetricFamily(
        "kvferry_resident_blocks", "Blocks that peers can fetch now", value=num_resident_blocks
    )
