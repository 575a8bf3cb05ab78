"""What one instance has done with its cache since it registered, and what it holds for others.

A request counts when it is admitted. One that does not fit and asks again every step has therefore
counted once, and one that lost its blocks (it was preempted, or a load failed) counts apart when it
comes back: what it finds then is mostly its own work.
"""

from dataclasses import dataclass

BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper ends of the buckets of every histogram, in seconds; vLLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Requests admitted, their tokens, and where those tokens' KV came from.

    `requested`: the tokens asked to be in place, at admission. Of these `local_hit` were found
    here, `remote_hit` came from peers, `computed` were computed, and `abandoned` were not in place
    yet when the request gave its blocks back. The rest is `pending`: the requests that have it are
    still here. All of these are tokens; `requests` is how many were admitted.
    """

    requests: int = 0
    requested: int = 0
    local_hit: int = 0
    remote_hit: int = 0
    computed: int = 0
    abandoned: int = 0

    @property
    def pending(self) -> int:
        """Tokens that requests still here are waiting for."""
        return self.requested - self.local_hit - self.remote_hit - self.computed - self.abandoned

    @property
    def hit_rate(self) -> float:
        """Found share of the requested tokens, here or at a peer, 0 to 1."""
        return (self.local_hit + self.remote_hit) / self.requested if self.requested else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often durations were how long.

    `counts[i]` of them were at most `upper_ends_s[i]` seconds and more than the end before; the
    last count, one more than there are ends, is of those beyond all. `sum_s` is of all of them.
    """

    upper_ends_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How long sampled blocks kept a content until it was evicted or overwritten.

    `lifetime`: since the block was handed out. `idle`: since it was used last. `reuse_gap`: between
    its last uses, of which 4 are remembered.
    """

    lifetime: Histogram
    idle: Histogram
    reuse_gap: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What keeps blocks of an instance in place now, beside its running requests.

    `leases` keep `leased_blocks`, each counted once, for whoever reads them. `reservations` have
    `reserved_blocks` that clients are writing, `loads` have `loading_blocks` that peers' blocks are
    being pulled into; none of these can be found. Of the latter `quarantined_blocks` are of loads
    that were given up: nobody gets them before their writer is closed.
    """

    leases: int = 0
    leased_blocks: int = 0
    reservations: int = 0
    reserved_blocks: int = 0
    loads: int = 0
    loading_blocks: int = 0
    quarantined_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStats:
    """Token counts of first admissions and, apart, of requests that were preempted before.

    `residency` is None where blocks are not sampled.
    """

    first: TokenCounts = TokenCounts()
    preempted: TokenCounts = TokenCounts()
    residency: Residency | None = None
