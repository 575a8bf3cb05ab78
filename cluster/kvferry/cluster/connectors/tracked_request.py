"""What the scheduler half remembers of one request."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvferry.cluster.connectors.prefixes import Prefix
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.hashing import HashChain
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import HashScheme

# An answer is "really available now" only for a moment.
LOOKUP_VALID_S = 2.0


class Lookup:
    """One question after a request's prefix; `clock` says when it was asked, and answered."""

    def __init__(self, answer: "Future[Prefix]", clock: Callable[[], float]) -> None:
        self.answer = answer
        self.asked_s = clock()
        self._answered_s = math.inf
        answer.add_done_callback(lambda _: self._note(clock()))

    def is_old(self, now_s: float) -> bool:
        """Return whether the answer came more than a moment ago, however long it took."""
        return now_s - self._answered_s > LOOKUP_VALID_S

    def _note(self, now_s: float) -> None:
        self._answered_s = now_s


@dataclass(slots=True)
class TrackedRequest:
    """A request from when the engine first asks about it until it is finished.

    `prefix`: the answer to `lookup`. `num_saved`: so many of the first hash
    blocks are saved, or ordered to be. `wanted_until_s`: until when it waits for blocks that a
    prefill engine is about to save.
    """

    request: Any
    chain: HashChain
    block_ids: list[int] = field(default_factory=list)
    num_saved: int = 0
    lookup: Lookup | None = None
    prefix: Prefix | None = None
    is_loading: bool = False
    has_failed: bool = False
    may_save: bool = True
    has_saved: bool = False
    wanted_until_s: float | None = None

    @classmethod
    def of(cls, request: Any, scheme: HashScheme, keys: RequestKeys) -> "TrackedRequest":
        """Return the memory of a new request."""
        return cls(request=request, chain=HashChain(scheme, keys, who=request.request_id))

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose ids are known: those of the prompt and those generated."""
        return len(self.request.all_token_ids)

    def hashes(self) -> tuple[BlockHash, ...]:
        """Return the hashes of all full blocks of the known tokens."""
        if self.chain.num_tokens < self.num_tokens:
            self.chain.extend(self.request.all_token_ids[self.chain.num_tokens :])
        return self.chain.hashes
