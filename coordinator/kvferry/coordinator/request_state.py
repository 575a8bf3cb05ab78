"""What the coordinator knows of one request at one instance."""

from dataclasses import dataclass, field

from kvferry.proto.extra_keys import NO_KEYS, RequestKeys
from kvferry.proto.ids import BlockHash, RequestId
from kvferry.proto.step_messages import RequestContent


@dataclass(slots=True, kw_only=True)
class KnownContent:
    """A `RequestContent` whose tokens grow with the request."""

    tokens: list[int]
    keys: RequestKeys = NO_KEYS
    lora_id: int | None = None


def known_content(told: RequestContent | None) -> KnownContent | None:
    """Return what an engine told of a request's content as the request keeps it."""
    if told is None:
        return None
    return KnownContent(tokens=list(told.tokens), keys=told.keys, lora_id=told.lora_id)


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request's counts, in tokens, and the hashes of its full hash blocks.

    `num_computed_tokens`: slots `[0, n)` are written. `num_preemptions` counts how often the
    request lost its blocks (its hits then are its own and do not count in the hit rate).
    `num_prompt_tokens`: where a request with the same prompt would resume (0: not told); only
    caches with sparse or partial hits ask. `shared_prefix_tokens` is left by a lookup: how far
    some group holds the prefix beyond the hit, 0 if none does. `content` is None where only
    hashes are known; events then tell no tokens.
    """

    request_id: RequestId
    num_tokens: int
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    num_prompt_tokens: int = 0
    shared_prefix_tokens: int = 0
    content: KnownContent | None = None
