"""Translates an instance's statistics to the protobuf messages of `v1/control.proto` and back."""

from kvferry.proto.instance_stats import Held, Histogram, InstanceStats, Residency, TokenCounts
from kvferry.proto.v1 import control_pb2 as pb


def stats_to_pb(stats: InstanceStats) -> pb.Stats:
    """Translate statistics."""
    return pb.Stats(
        first=_counts_to_pb(stats.first),
        preempted=_counts_to_pb(stats.preempted),
        residency=None if stats.residency is None else _residency_to_pb(stats.residency),
    )


def stats_from_pb(message: pb.Stats) -> InstanceStats:
    """Translate statistics back."""
    has_residency = message.HasField("residency")
    return InstanceStats(
        first=_counts_from_pb(message.first),
        preempted=_counts_from_pb(message.preempted),
        residency=_residency_from_pb(message.residency) if has_residency else None,
    )


def held_to_pb(held: Held) -> pb.Held:
    """Translate what an instance holds."""
    return pb.Held(
        leases=held.leases,
        leased_blocks=held.leased_blocks,
        reservations=held.reservations,
        reserved_blocks=held.reserved_blocks,
        loads=held.loads,
        loading_blocks=held.loading_blocks,
        quarantined_blocks=held.quarantined_blocks,
    )


def held_from_pb(message: pb.Held) -> Held:
    """Translate what an instance holds back."""
    return Held(
        leases=message.leases,
        leased_blocks=message.leased_blocks,
        reservations=message.reservations,
        reserved_blocks=message.reserved_blocks,
        loads=message.loads,
        loading_blocks=message.loading_blocks,
        quarantined_blocks=message.quarantined_blocks,
    )


def _counts_to_pb(counts: TokenCounts) -> pb.TokenCounts:
    return pb.TokenCounts(
        requests=counts.requests,
        requested_tokens=counts.requested,
        local_hit_tokens=counts.local_hit,
        remote_hit_tokens=counts.remote_hit,
        computed_tokens=counts.computed,
        abandoned_tokens=counts.abandoned,
    )


def _counts_from_pb(message: pb.TokenCounts) -> TokenCounts:
    return TokenCounts(
        requests=message.requests,
        requested=message.requested_tokens,
        local_hit=message.local_hit_tokens,
        remote_hit=message.remote_hit_tokens,
        computed=message.computed_tokens,
        abandoned=message.abandoned_tokens,
    )


def _residency_to_pb(residency: Residency) -> pb.Residency:
    return pb.Residency(
        lifetime=_histogram_to_pb(residency.lifetime),
        idle=_histogram_to_pb(residency.idle),
        reuse_gap=_histogram_to_pb(residency.reuse_gap),
    )


def _residency_from_pb(message: pb.Residency) -> Residency:
    return Residency(
        lifetime=_histogram_from_pb(message.lifetime),
        idle=_histogram_from_pb(message.idle),
        reuse_gap=_histogram_from_pb(message.reuse_gap),
    )


def _histogram_to_pb(histogram: Histogram) -> pb.Histogram:
    return pb.Histogram(
        upper_ends_s=histogram.upper_ends_s, counts=histogram.counts, sum_s=histogram.sum_s
    )


def _histogram_from_pb(message: pb.Histogram) -> Histogram:
    return Histogram(
        upper_ends_s=tuple(message.upper_ends_s),
        counts=tuple(message.counts),
        sum_s=message.sum_s,
    )
