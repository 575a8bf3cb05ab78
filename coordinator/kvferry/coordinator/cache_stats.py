"""Prefix-hit statistics of one instance, counted once per admission."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PrefixCacheStats:
    """Tokens asked for and found; requests that were preempted before are kept apart.

    `queries` and `hits` are in tokens, `requests` counts admissions.
    `reset`: the cache was emptied.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Found share of the tokens of first admissions, 0 to 1."""
        return self.hits / self.queries if self.queries else 0.0

    def record(self, *, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one admission of a request of `num_tokens` tokens, of which `num_hits` hit."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
