"""What the coordinator knows of one request at one instance."""

from dataclasses import dataclass, field

from kvferry.proto.ids import BlockHash, RequestId


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request's counts, in tokens, and the hashes of its full blocks.

    `num_computed_tokens`: slots `[0, n)` are written. `num_preemptions` counts how often the
    request lost its blocks (its hits then are its own and do not count in the hit rate).
    """

    request_id: RequestId
    num_tokens: int
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
