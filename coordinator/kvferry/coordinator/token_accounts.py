"""Where the tokens of an instance's requests came from, counted once each."""

from dataclasses import dataclass

from kvferry.proto.ids import RequestId
from kvferry.proto.instance_stats import TokenCounts


@dataclass(slots=True)
class _Counters:
    """`TokenCounts` that grow."""

    requests: int = 0
    requested: int = 0
    local_hit: int = 0
    remote_hit: int = 0
    computed: int = 0
    abandoned: int = 0

    def read(self) -> TokenCounts:
        return TokenCounts(
            requests=self.requests,
            requested=self.requested,
            local_hit=self.local_hit,
            remote_hit=self.remote_hit,
            computed=self.computed,
            abandoned=self.abandoned,
        )


@dataclass(slots=True)
class _Stay:
    """One admission: tokens `[0, in_place)` of those asked for are written."""

    counters: _Counters
    asked: int
    in_place: int

    def advance(self, end: int) -> int:
        """Move to `end` and return how many of the tokens asked for are newly in place."""
        new = max(min(end, self.asked) - self.in_place, 0)
        self.in_place += new
        return new


class TokenAccounts:
    """Counts the tokens of the requests of one instance, from admission to end."""

    def __init__(self) -> None:
        self._first = _Counters()
        self._preempted = _Counters()
        self._stays: dict[RequestId, _Stay] = {}

    def admitted(
        self,
        request_id: RequestId,
        *,
        asked_tokens: int,
        hit_tokens: int,
        ahead_tokens: int,
        resumed: bool,
    ) -> None:
        """Count an admission that asks for `asked_tokens`, of which the first hits are here.

        `ahead_tokens` of those came from a peer, ahead of the admission.
        """
        counters = self._preempted if resumed else self._first
        counters.requests += 1
        counters.requested += asked_tokens
        stay = self._stays[request_id] = _Stay(counters, asked_tokens, 0)
        counters.remote_hit += stay.advance(min(ahead_tokens, hit_tokens))
        counters.local_hit += stay.advance(hit_tokens)

    def uncounted(self, request_id: RequestId) -> None:
        """Open the account of a request that is not admitted now.

        It loads ahead, and counts when it is admitted; or it was admitted before a restart.
        """
        self._stays[request_id] = _Stay(self._first, asked=0, in_place=0)

    def loaded(self, request_id: RequestId, num_tokens: int) -> None:
        """Count what came from a peer: the first `num_tokens` tokens are in place now."""
        stay = self._stays[request_id]
        stay.counters.remote_hit += stay.advance(num_tokens)

    def computed(self, request_id: RequestId, num_tokens: int) -> None:
        """Count what was computed: the first `num_tokens` tokens are in place now."""
        stay = self._stays[request_id]
        if stay.in_place < stay.asked:  # not for every token that is generated
            stay.counters.computed += stay.advance(num_tokens)

    def ended(self, request_id: RequestId) -> None:
        """Close the account of a request that gives its blocks back, finished or not."""
        stay = self._stays.pop(request_id)
        stay.counters.abandoned += stay.asked - stay.in_place

    def num_pending(self) -> int:
        """Return how many tokens the requests still here wait for (for checks)."""
        return sum(stay.asked - stay.in_place for stay in self._stays.values())

    def read(self) -> tuple[TokenCounts, TokenCounts]:
        """Return the counts of first admissions, and of requests that were preempted before."""
        return self._first.read(), self._preempted.read()
