"""What the coordinator says of the service as Prometheus metrics."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from kvferry.proto.instance_stats import Histogram, Residency, TokenCounts
from kvferry.proto.messages import Description, InstanceStatus

_LABELS = ("instance_id", "role")
_GAUGES: tuple[tuple[str, str, Callable[[InstanceStatus], float]], ...] = (
    ("used_blocks", "Blocks with an owner", lambda one: one.num_used_blocks),
    ("free_blocks", "Blocks that can be handed out now", lambda one: one.num_free_blocks),
    ("cached_blocks", "Findable blocks, used or free", lambda one: one.num_cached_blocks),
    ("requests", "Running and loading requests", lambda one: one.num_requests),
    ("leases", "Leases on blocks of the instance", lambda one: one.held.leases),
    ("leased_blocks", "Blocks that leases keep", lambda one: one.held.leased_blocks),
    ("reservations", "Stores of clients under way", lambda one: one.held.reservations),
    ("reserved_blocks", "Blocks being stored into", lambda one: one.held.reserved_blocks),
    ("loads", "Requests whose blocks are being pulled", lambda one: one.held.loads),
    ("loading_blocks", "Blocks being pulled into", lambda one: one.held.loading_blocks),
    (
        "quarantined_blocks",
        "Loading blocks of loads that were given up and whose writer may be open",
        lambda one: one.held.quarantined_blocks,
    ),
)
_SOURCES: tuple[tuple[str, Callable[[TokenCounts], int]], ...] = (
    ("local_hit", lambda counts: counts.local_hit),
    ("remote_hit", lambda counts: counts.remote_hit),
    ("computed", lambda counts: counts.computed),
    ("abandoned", lambda counts: counts.abandoned),
)
_RESIDENCY: tuple[tuple[str, str, Callable[[Residency], Histogram]], ...] = (
    ("lifetime", "How long sampled blocks kept a content", lambda residency: residency.lifetime),
    ("idle", "How long it had not been used then", lambda residency: residency.idle),
    ("reuse_gap", "How far apart its last uses were", lambda residency: residency.reuse_gap),
)


def coordinator_metrics(description: Description) -> Iterator[Metric]:
    """Yield the service at one moment; what is counted begins anew with an instance's life."""
    for name, meaning, read in _GAUGES:
        gauge = GaugeMetricFamily(f"kvferry_{name}", meaning, labels=_LABELS)
        for status in description.instances:
            gauge.add_metric(_labels(status), read(status))
        yield gauge
    states = GaugeMetricFamily(
        "kvferry_instance_state", "1 for the state of each instance", labels=(*_LABELS, "state")
    )
    for status in description.instances:
        states.add_metric((*_labels(status), status.state), 1)
    yield states
    yield from _token_metrics(description.instances)
    yield from _residency_metrics(description.instances)
    yield GaugeMetricFamily(
        "kvferry_handoffs", "Handoffs from prefill to decode", value=description.num_handoffs
    )
    yield GaugeMetricFamily(
        "kvferry_coordinator_epoch", "Life of the coordinator", value=description.epoch
    )
    events = CounterMetricFamily(
        "kvferry_events", "What happened since the coordinator began", labels=("event",)
    )
    for event, number in description.counters.items():
        events.add_metric((event,), number)
    yield events


def _labels(status: InstanceStatus) -> tuple[str, str]:
    return status.info.instance_id, status.info.role


def _token_metrics(instances: Sequence[InstanceStatus]) -> Iterator[Metric]:
    labels = (*_LABELS, "admission")
    admissions = CounterMetricFamily("kvferry_admissions", "Requests admitted", labels=labels)
    requested = CounterMetricFamily(
        "kvferry_requested_tokens", "Tokens that admitted requests asked for", labels=labels
    )
    tokens = CounterMetricFamily(
        "kvferry_tokens", "Where requested tokens came from", labels=(*labels, "source")
    )
    for status in instances:
        parts = (("first", status.stats.first), ("preempted", status.stats.preempted))
        for admission, counts in parts:
            of = (*_labels(status), admission)
            admissions.add_metric(of, counts.requests)
            requested.add_metric(of, counts.requested)
            for source, read in _SOURCES:
                tokens.add_metric((*of, source), read(counts))
    yield from (admissions, requested, tokens)


def _residency_metrics(instances: Sequence[InstanceStatus]) -> Iterator[Metric]:
    """Yield histograms of the instances whose blocks are sampled, if any."""
    sampled = [(status, status.stats.residency) for status in instances if status.stats.residency]
    for name, meaning, read in _RESIDENCY if sampled else ():
        family = HistogramMetricFamily(f"kvferry_block_{name}_seconds", meaning, labels=_LABELS)
        for status, residency in sampled:
            histogram = read(residency)
            ends = (*map(str, histogram.upper_ends_s), "+Inf")
            buckets = list(zip(ends, accumulate(histogram.counts), strict=True))
            family.add_metric(_labels(status), buckets, histogram.sum_s)
        yield family
