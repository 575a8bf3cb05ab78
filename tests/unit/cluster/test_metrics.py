"""Statistics as Prometheus reads them, to the letter."""

from collections.abc import Iterable

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from tests.builders import make_info

from kvferry.cluster.metrics.coordinator_metrics import coordinator_metrics
from kvferry.cluster.metrics.targets import targets
from kvferry.cluster.metrics.worker_metrics import worker_metrics
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import Epoch
from kvferry.proto.instance_stats import Held, Histogram, InstanceStats, Residency, TokenCounts
from kvferry.proto.messages import Description, InstanceStatus
from kvferry.worker.stats import TransferCounts, WorkerStats


class Given(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def text(metrics: Iterable[Metric]) -> str:
    return generate_latest(Given(metrics)).decode()


def samples(metrics: Iterable[Metric]) -> list[str]:
    return [line for line in text(metrics).splitlines() if not line.startswith("#")]


def description(*instances: InstanceStatus) -> Description:
    return Description(
        epoch=Epoch(3),
        scheme=make_scheme(hash_block_tokens=4),
        instances=instances,
        num_leases=0,
        num_handoffs=2,
        counters={"preemptions": 7, "failed_loads": 0},
    )


DECODE = InstanceStatus(
    info=make_info(rank_metrics=("10.0.0.1:9001",)),
    num_used_blocks=4,
    num_free_blocks=5,
    num_cached_blocks=6,
    num_requests=1,
    stats=InstanceStats(
        first=TokenCounts(
            requests=3, requested=90, local_hit=16, remote_hit=32, computed=7, abandoned=5
        ),
        preempted=TokenCounts(requests=1, requested=20, local_hit=16),
    ),
    held=Held(
        leases=2,
        leased_blocks=3,
        reservations=1,
        reserved_blocks=2,
        loads=1,
        loading_blocks=2,
        quarantined_blocks=2,
    ),
    state="suspect",
)


def test_a_workers_metrics_are_this_text() -> None:
    stats = WorkerStats(
        transfers={
            ("served", "grpc"): TransferCounts(
                num_started=5,
                num_in_progress=2,
                num_bytes=4096,
                seconds=0.75,
                failures={"StaleError": 1, "Cancelled": 2},
            ),
            ("pulled", "shm"): TransferCounts(num_started=1, num_bytes=64, seconds=0.5),
        },
        num_blocks_pulled=8,
        num_checksum_failures=1,
    )
    expected = """\
# HELP kvferry_transfers_total Transfers that have ended, failed ones included
# TYPE kvferry_transfers_total counter
kvferry_transfers_total{direction="served",path="grpc"} 3.0
kvferry_transfers_total{direction="pulled",path="shm"} 1.0
# HELP kvferry_transfer_bytes_total Block bytes moved, without envelopes
# TYPE kvferry_transfer_bytes_total counter
kvferry_transfer_bytes_total{direction="served",path="grpc"} 4096.0
kvferry_transfer_bytes_total{direction="pulled",path="shm"} 64.0
# HELP kvferry_transfer_seconds_total Time that the transfers took that have ended
# TYPE kvferry_transfer_seconds_total counter
kvferry_transfer_seconds_total{direction="served",path="grpc"} 0.75
kvferry_transfer_seconds_total{direction="pulled",path="shm"} 0.5
# HELP kvferry_transfer_failures_total Transfers that ended before everything had moved
# TYPE kvferry_transfer_failures_total counter
kvferry_transfer_failures_total{direction="served",path="grpc",reason="StaleError"} 1.0
kvferry_transfer_failures_total{direction="served",path="grpc",reason="Cancelled"} 2.0
# HELP kvferry_transfers_in_progress Transfers under way
# TYPE kvferry_transfers_in_progress gauge
kvferry_transfers_in_progress{direction="served",path="grpc"} 2.0
kvferry_transfers_in_progress{direction="pulled",path="shm"} 0.0
# HELP kvferry_pulled_blocks_total Blocks pulled whole
# TYPE kvferry_pulled_blocks_total counter
kvferry_pulled_blocks_total 8.0
# HELP kvferry_checksum_failures_total Received frames whose checksum was wrong
# TYPE kvferry_checksum_failures_total counter
kvferry_checksum_failures_total 1.0
# HELP kvferry_resident_blocks Blocks that peers can fetch now
# TYPE kvferry_resident_blocks gauge
kvferry_resident_blocks 12.0
"""
    assert text(worker_metrics(stats, num_resident_blocks=12)) == expected


def test_the_coordinators_metrics_are_what_it_says_of_itself() -> None:
    of = 'instance_id="decode-0",role="decode"'
    first, preempted = (f'{{admission="{which}",{of}' for which in ("first", "preempted"))
    assert samples(coordinator_metrics(description(DECODE))) == [
        f"kvferry_used_blocks{{{of}}} 4.0",
        f"kvferry_free_blocks{{{of}}} 5.0",
        f"kvferry_cached_blocks{{{of}}} 6.0",
        f"kvferry_requests{{{of}}} 1.0",
        f"kvferry_leases{{{of}}} 2.0",
        f"kvferry_leased_blocks{{{of}}} 3.0",
        f"kvferry_reservations{{{of}}} 1.0",
        f"kvferry_reserved_blocks{{{of}}} 2.0",
        f"kvferry_loads{{{of}}} 1.0",
        f"kvferry_loading_blocks{{{of}}} 2.0",
        f"kvferry_quarantined_blocks{{{of}}} 2.0",
        f'kvferry_instance_state{{{of},state="suspect"}} 1.0',
        f"kvferry_admissions_total{first}}} 3.0",
        f"kvferry_admissions_total{preempted}}} 1.0",
        f"kvferry_requested_tokens_total{first}}} 90.0",
        f"kvferry_requested_tokens_total{preempted}}} 20.0",
        f'kvferry_tokens_total{first},source="local_hit"}} 16.0',
        f'kvferry_tokens_total{first},source="remote_hit"}} 32.0',
        f'kvferry_tokens_total{first},source="computed"}} 7.0',
        f'kvferry_tokens_total{first},source="abandoned"}} 5.0',
        f'kvferry_tokens_total{preempted},source="local_hit"}} 16.0',
        f'kvferry_tokens_total{preempted},source="remote_hit"}} 0.0',
        f'kvferry_tokens_total{preempted},source="computed"}} 0.0',
        f'kvferry_tokens_total{preempted},source="abandoned"}} 0.0',
        "kvferry_handoffs 2.0",
        "kvferry_coordinator_epoch 3.0",
        'kvferry_events_total{event="preemptions"} 7.0',
        'kvferry_events_total{event="failed_loads"} 0.0',
    ]


def test_sampled_blocks_give_cumulative_histograms() -> None:
    none = Histogram(upper_ends_s=(0.5,), counts=(0, 0), sum_s=0.0)
    stats = InstanceStats(
        residency=Residency(
            lifetime=Histogram(upper_ends_s=(0.5, 2.0), counts=(1, 2, 4), sum_s=12.25),
            idle=none,
            reuse_gap=none,
        )
    )
    sampled = InstanceStatus(
        info=make_info("store-0", role="store"),
        num_used_blocks=0,
        num_free_blocks=9,
        num_cached_blocks=0,
        num_requests=0,
        stats=stats,
        held=Held(),
    )
    of = 'instance_id="store-0"'
    lines = samples(coordinator_metrics(description(DECODE, sampled)))
    assert [line for line in lines if "lifetime" in line] == [
        f'kvferry_block_lifetime_seconds_bucket{{{of},le="0.5",role="store"}} 1.0',
        f'kvferry_block_lifetime_seconds_bucket{{{of},le="2.0",role="store"}} 3.0',
        f'kvferry_block_lifetime_seconds_bucket{{{of},le="+Inf",role="store"}} 7.0',
        f'kvferry_block_lifetime_seconds_count{{{of},role="store"}} 7.0',
        f'kvferry_block_lifetime_seconds_sum{{{of},role="store"}} 12.25',
    ]


def test_targets_are_the_coordinator_and_every_rank_that_serves_metrics() -> None:
    silent = InstanceStatus(
        info=make_info("store-0", role="store"),
        num_used_blocks=0,
        num_free_blocks=9,
        num_cached_blocks=0,
        num_requests=0,
        stats=InstanceStats(),
        held=Held(),
    )
    assert targets(description(DECODE, silent), "10.0.0.9:9000") == [
        {"targets": ["10.0.0.9:9000"], "labels": {"component": "coordinator"}},
        {
            "targets": ["10.0.0.1:9001"],
            "labels": {
                "component": "rank",
                "instance_id": "decode-0",
                "role": "decode",
                "rank": "0",
            },
        },
    ]
