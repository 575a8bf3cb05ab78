"""Grants block slots to the requests of one instance, from one pool, over its cache groups.

Behaves like vLLM 0.32's KVCacheManager: a refused allocation changes nothing, hits are touched
before anything is allocated, and statistics are recorded once, at admission. One group of full
attention today; every key and table carries its group already.
"""

from collections.abc import Iterable, Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_stats import PrefixCacheStats
from kvferry.coordinator.full_attention import FullAttention
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockId, GroupId, RequestId

GroupBlocks = tuple[Sequence[BlockId], ...]
"""One list of block ids per group, in group order."""


class CacheManager:
    """The pool and block tables of one instance.

    `block_tokens` is what one block id covers (and one hash); `max_model_len` (tokens) caps the
    slots of a request.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, max_model_len: int, enable_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.block_tokens = block_tokens
        self.max_model_len = max_model_len
        self.groups = (FullAttention(self.pool, block_tokens, GroupId(0)),)
        self._stats = PrefixCacheStats()

    def block_table(self, request_id: RequestId) -> GroupBlocks:
        """Return a request's blocks per group; empty lists for an unknown request."""
        return tuple(group.table(request_id) for group in self.groups)

    def get_computed_blocks(
        self, request: RequestState, max_tokens: int | None = None
    ) -> tuple[GroupBlocks, int]:
        """Return the longest usable cached prefix: its blocks per group, and its tokens.

        At most `num_tokens - 1` tokens (the last one must be computed for its logits) and at most
        `max_tokens`. Nothing is referenced: allocate before anything else happens in the pool.
        """
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return tuple(() for _ in self.groups), 0
        limit = request.num_tokens - 1
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        (group,) = self.groups
        blocks = group.find_longest_hit(request.hashes, limit)
        return (blocks,), len(blocks) * group.block_tokens

    def record_admission(self, request: RequestState, num_hit_tokens: int) -> None:
        """Count an admitted request in the prefix-hit statistics."""
        if self.pool.enable_caching and not request.skip_reading_prefix_cache:
            self._stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hit_tokens,
                preempted=request.num_preemptions > 0,
            )

    def allocate_slots(
        self,
        request: RequestState,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: GroupBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> GroupBlocks | None:
        """Grant slots for a request's computed, external and new tokens (all counts in tokens).

        Args:
            request: whose table grows.
            num_new_tokens: tokens to compute now, unverified drafts included.
            num_new_computed_tokens: local prefix hits, held by `new_computed_blocks`.
            new_computed_blocks: what `get_computed_blocks` returned, only on admission.
            num_lookahead_tokens: slots beyond the new tokens for a drafter.
            num_external_computed_tokens: tokens to be loaded from elsewhere.
            delay_cache_blocks: make nothing findable now (it is not written yet).

        Returns:
            The blocks added for new tokens, per group (those for hits and external tokens are in
            the table only), or None when the pool is too full; nothing has changed then.

        Raises:
            BadInputError: neither new nor external tokens are asked for.

        """
        if num_new_tokens == 0 and num_external_computed_tokens == 0:
            raise BadInputError(
                "num_new_tokens must be positive when no external tokens are asked for",
                given=num_new_tokens,
                allowed=">= 1",
            )
        computed = new_computed_blocks or tuple(() for _ in self.groups)
        local = request.num_computed_tokens + num_new_computed_tokens
        total = min(local + num_external_computed_tokens, self.max_model_len)
        needed = min(total + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        if self._count_blocks(request, needed, computed) > self.pool.num_free_blocks:
            return None
        if new_computed_blocks is not None or num_external_computed_tokens:
            # Every group's hits first: an allocation could evict hits that nobody holds yet.
            for group, blocks in zip(self.groups, computed, strict=True):
                group.adopt_computed(request.request_id, blocks)
            for group in self.groups:
                if num_external_computed_tokens:
                    group.extend(request.request_id, total)
        new = tuple(group.extend(request.request_id, needed) for group in self.groups)
        if not delay_cache_blocks:
            self.cache_blocks(request, min(total + num_new_tokens, request.num_tokens))
        return new

    def adopt_computed_blocks(self, request: RequestState, blocks: GroupBlocks) -> None:
        """Give an admitted request its hits and no more: everything it wants is cached."""
        for group, computed in zip(self.groups, blocks, strict=True):
            group.adopt_computed(request.request_id, computed)

    def count_missing_blocks(self, request: RequestState, num_new_tokens: int) -> int:
        """Return how many blocks are too few for a running request's new tokens (0: it fits)."""
        needed = min(request.num_computed_tokens + num_new_tokens, self.max_model_len)
        nothing: GroupBlocks = tuple(() for _ in self.groups)
        return max(self._count_blocks(request, needed, nothing) - self.pool.num_free_blocks, 0)

    def cache_blocks(self, request: RequestState, num_tokens: int) -> None:
        """Make the full blocks of a request's first `num_tokens` (written) tokens findable."""
        if self.pool.enable_caching:
            for group in self.groups:
                group.cache_blocks(request.request_id, request.hashes, num_tokens)

    def free(self, request_id: RequestId) -> None:
        """Give all blocks of a request back, the last first. Unknown requests are no error."""
        for group in self.groups:
            group.free(request_id)

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Forget the hashes of blocks; their owners keep them.

        Raises:
            BadInputError: an id outside the pool.

        """
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash, and tell whether that was done: not while a block is in use."""
        done = self.pool.reset()
        if done:
            self._stats.reset = True
        return done

    def take_stats(self) -> PrefixCacheStats:
        """Return the statistics since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def _count_blocks(self, request: RequestState, num_tokens: int, computed: GroupBlocks) -> int:
        return sum(
            group.count_blocks_to_allocate(request.request_id, num_tokens, blocks)
            for group, blocks in zip(self.groups, computed, strict=True)
        )
