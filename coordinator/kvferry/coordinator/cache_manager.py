"""Grants block slots to the requests of one instance, from one pool, over its cache groups.

Decides as vLLM's KVCacheManager does in the version that the profile names: a refused allocation
hands out nothing, and what a lookup returned must be allocated before anything else happens.
"""

from collections.abc import Iterable, Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_stats import PrefixCacheStats
from kvferry.coordinator.hit_finders import GroupBlocks, make_hit_finder
from kvferry.coordinator.managers.base import SlotAsk
from kvferry.coordinator.managers.registry import make_manager
from kvferry.coordinator.refusals import call_refused
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockId, GroupId, RequestId

BlockCopy = tuple[BlockId, BlockId]
"""Source and target of a copy that must be made before the next step computes."""


class CacheManager:
    """The pool and block tables of one instance.

    `block_tokens` is what one block id of the first group covers over all ranks.

    Raises:
        ConfigError: a group of a kind that nobody manages.

    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_blocks,
            config.enable_caching,
            unhashed_first=config.rules.frees_unhashed_first,
            record_events=config.record_events,
        )
        self.groups = tuple(
            make_manager(self.pool, config, GroupId(i)) for i in range(len(config.groups))
        )
        self.block_tokens = self.groups[0].block_tokens if self.groups else config.hash_block_tokens
        self.max_model_len = config.max_model_len
        self._rules = config.rules
        self._finder = make_hit_finder(config, self.groups)
        self._no_blocks: GroupBlocks = tuple(() for _ in self.groups)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._scheduler_block_tokens = config.scheduler_block_tokens
        self._drops_any = config.drops_any
        # Hits of several groups end at common block ends only, unless any hash will do.
        self._aligns_caching = (
            config.rules.caches_reachable_only and len(self.groups) > 1 and not config.partial_hits
        )
        self._stats = PrefixCacheStats()

    # --- finding -----------------------------------------------------------------------------

    def block_table(self, request_id: RequestId) -> GroupBlocks:
        """Return a request's blocks per group; empty lists for an unknown request."""
        return tuple(group.table(request_id) for group in self.groups)

    def get_computed_blocks(
        self, request: RequestState, max_tokens: int | None = None
    ) -> tuple[GroupBlocks, int]:
        """Return the longest usable cached prefix: its blocks per group, and its tokens.

        At most `num_tokens - 1` tokens (the last one must be computed for its logits) and at most
        `max_tokens`. Nothing is referenced: allocate before anything else happens in the pool.
        The request's `shared_prefix_tokens` are set.

        Raises:
            BadInputError: a group cannot be looked up in this configuration.

        """
        request.shared_prefix_tokens = 0
        if not self._looks_up(request):
            return self._no_blocks, 0
        limit = request.num_tokens - 1
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        hit = self._finder.find(request.hashes, limit)
        request.shared_prefix_tokens = hit.shared_tokens
        if self._rules.counts_at_lookup:
            self._record(request, hit.num_tokens)
        return hit.blocks, hit.num_tokens

    def record_admission(self, request: RequestState, num_hit_tokens: int) -> None:
        """Count an admitted request in the statistics, where lookups are not counted already."""
        if self._looks_up(request) and not self._rules.counts_at_lookup:
            self._record(request, num_hit_tokens)

    def count_common_prefix_blocks(self, request_id: RequestId) -> tuple[int, ...]:
        """Return per group how many blocks, from the first, all requests with blocks share."""
        return tuple(group.count_common_prefix(request_id) for group in self.groups)

    # --- granting ----------------------------------------------------------------------------

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
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled: bool = False,
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
            num_encoder_tokens: what cross-attention groups hold.
            full_sequence_must_fit: refuse unless all tokens of the request would fit now.
            reserved_blocks: free blocks that must be left for others.
            has_scheduled: others run in this step, so an admission leaves the watermark free.

        Returns:
            The blocks added for new tokens, per group (those for hits and external tokens are in
            the table only), or None when the pool is too full. Then nothing was handed out; blocks
            that no later token attends to may have been given back.

        Raises:
            BadInputError: nothing is asked for, or the profile does not know an argument.

        """
        self._refuse_arguments(
            num_new_tokens,
            num_external_computed_tokens,
            num_new_computed_tokens,
            with_reserve=full_sequence_must_fit or reserved_blocks > 0 or has_scheduled,
        )
        computed = self._no_blocks if new_computed_blocks is None else new_computed_blocks
        ask = self._ask(
            request,
            num_new_tokens,
            num_hit=num_new_computed_tokens,
            num_external=num_external_computed_tokens,
            num_lookahead=num_lookahead_tokens,
            num_encoder=num_encoder_tokens,
        )
        total = ask.main_tokens - num_new_tokens
        watermark = self._watermark_blocks if has_scheduled and not self._holds(request) else 0
        if full_sequence_must_fit and not self._fits_whole(request, ask, computed, watermark):
            return None
        for group in self.groups:
            group.remove_skipped(request.request_id, total)
        needed = self._count_blocks(ask, computed) + watermark
        if needed > self.pool.num_free_blocks - reserved_blocks:
            return None
        if num_external_computed_tokens or any(computed):
            self._adopt(ask, computed)
        new = tuple([group.extend(ask) for group in self.groups])
        if not delay_cache_blocks:
            # Drafts are not verified yet, so they lie beyond the request's own tokens.
            self.cache_blocks(request, min(ask.main_tokens, request.num_tokens))
        return new

    def count_missing_blocks(self, request: RequestState, num_new_tokens: int) -> int:
        """Return how many blocks are too few for a running request's new tokens (0: it fits).

        Meant to be asked after `allocate_slots` refused, so that what is granted is counted once.
        Like it, this gives back what no later token attends to first: nobody shall give way for
        blocks that the request itself no longer needs.
        """
        for group in self.groups:
            group.remove_skipped(request.request_id, request.num_computed_tokens)
        ask = self._ask(request, num_new_tokens)
        return max(self._count_blocks(ask, self._no_blocks) - self.pool.num_free_blocks, 0)

    def max_blocks_held(self, num_tokens: int) -> int:
        """Return the most blocks that a request of so many tokens holds at once."""
        return sum(group.max_blocks_held(num_tokens) for group in self.groups)

    def cache_blocks(self, request: RequestState, num_tokens: int) -> None:
        """Make the full blocks of a request's first `num_tokens` (written) tokens findable."""
        if not self.pool.enable_caching:
            return
        resume_at = self._resume_positions(request)
        for group in self.groups:
            num_cacheable = self._cacheable_tokens(num_tokens, group.group_id)
            group.cache_blocks(request, num_cacheable, resume_at)

    def restore(self, request: RequestState, tables: Sequence[Sequence[BlockId]]) -> None:
        """Take in a request that computes already, with its table of each group.

        Each block is its own where it is not completely written; otherwise it has its hash, or none
        and no owner either. What is written becomes findable.
        """
        resume_at = self._resume_positions(request)
        for group, table in zip(self.groups, tables, strict=True):
            num_cacheable = self._cacheable_tokens(request.num_computed_tokens, group.group_id)
            group.restore(request, table, num_cacheable, resume_at)

    # --- giving back -------------------------------------------------------------------------

    def free(self, request_id: RequestId) -> None:
        """Give all blocks of a request back, the last first. Unknown requests are no error."""
        for group in self.groups:
            group.free(request_id)

    def truncate(self, request: RequestState, num_tokens: int) -> None:
        """Roll a request back to its first `num_tokens` computed tokens.

        Its token count, hashes and content are cut, too. Nothing changes when it is refused.

        Raises:
            BadInputError: more tokens than are computed, a negative number, or a position at
                which some group cannot go on.

        """
        if not 0 <= num_tokens <= request.num_computed_tokens:
            raise BadInputError(
                f"request {request.request_id} cannot be rolled back to that",
                given=num_tokens,
                allowed=f"0 to {request.num_computed_tokens} tokens",
            )
        if num_tokens == request.num_tokens:
            return
        for group in self.groups:
            group.check_truncate(request.request_id, num_tokens)
        for group in self.groups:
            group.truncate(request.request_id, num_tokens)
        request.num_tokens = request.num_computed_tokens = num_tokens
        del request.hashes[num_tokens // self.config.hash_block_tokens :]
        if request.content is not None:
            del request.content.tokens[num_tokens:]

    def start_step(self) -> None:
        """Begin a scheduling step: what was made findable so far is written from now on."""
        for group in self.groups:
            group.start_step()

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to be made before the step computes; both ends stay referenced."""
        return [copy for group in self.groups for copy in group.take_copies()]

    def release_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Give back what copies that have been made kept referenced."""
        self.pool.free_blocks([block for copy in copies for block in copy])

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Forget the hashes of blocks; their owners keep them.

        Raises:
            BadInputError: an id outside the pool.

        """
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash, and tell whether that was done: not while a block is in use."""
        if self.pool.num_used_blocks:
            return False
        self.forget_all()
        return True

    def forget_all(self) -> int:
        """Forget every hash, of blocks in use too, and return how many blocks had one."""
        num_cached = self.pool.num_cached_blocks
        self.pool.forget_all()
        self._stats.reset = True
        if self.pool.sampler is not None:
            self.pool.sampler.forget()
        return num_cached

    def take_stats(self) -> PrefixCacheStats:
        """Return the statistics since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    # --- inside ------------------------------------------------------------------------------

    def _looks_up(self, request: RequestState) -> bool:
        return self.pool.enable_caching and not request.skip_reading_prefix_cache

    def _record(self, request: RequestState, num_hit_tokens: int) -> None:
        self._stats.record(
            num_tokens=request.num_tokens,
            num_hits=num_hit_tokens,
            preempted=request.num_preemptions > 0,
        )

    def _ask(
        self,
        request: RequestState,
        num_new: int,
        *,
        num_hit: int = 0,
        num_external: int = 0,
        num_lookahead: int = 0,
        num_encoder: int = 0,
    ) -> SlotAsk:
        local = request.num_computed_tokens + num_hit
        main = min(local + num_external, self.max_model_len) + num_new
        slots = min(main + num_lookahead, self.max_model_len)
        return SlotAsk(request.request_id, local, local + num_external, main, slots, num_encoder)

    def _refuse_arguments(
        self, num_new: int, num_external: int, num_hit: int, *, with_reserve: bool
    ) -> None:
        if not self._rules.admits_with_reserve:
            # Such a profile wants a token to compute or to load, hits or not.
            num_hit = 0
            if with_reserve:
                raise BadInputError(
                    "admission with a reserve, a watermark or a full-length check",
                    given=self.config.profile,
                    allowed="profile 0.32",
                )
        if not (num_new or num_external or num_hit):
            raise call_refused(
                "nothing_to_allocate",
                "num_new_tokens must be positive when nothing else is asked for",
                allowed=">= 1",
                num_new_tokens=num_new,
            )

    def _holds(self, request: RequestState) -> bool:
        return any(group.table(request.request_id) for group in self.groups)

    def _fits_whole(
        self, request: RequestState, ask: SlotAsk, computed: GroupBlocks, watermark: int
    ) -> bool:
        whole = min(request.num_tokens, self.max_model_len)
        ask = ask._replace(main_tokens=whole, slot_tokens=whole, capped=True)
        return self._count_blocks(ask, computed) + watermark <= self.pool.num_free_blocks

    def _count_blocks(self, ask: SlotAsk, computed: GroupBlocks) -> int:
        return sum(
            [
                group.count_blocks_to_allocate(ask, blocks)
                for group, blocks in zip(self.groups, computed, strict=True)
            ]
        )

    def _adopt(self, ask: SlotAsk, computed: GroupBlocks) -> None:
        """Take hits, and blocks for external tokens, for a request that has none yet."""
        loads = ask.computed_tokens > ask.local_tokens
        if self._rules.touches_before_loads:
            # Every group's hits first: taking blocks could evict hits that nobody holds yet.
            if any(group.is_running(ask.request_id) for group in self.groups):
                return
            for group, blocks in zip(self.groups, computed, strict=True):
                group.adopt_computed(ask, blocks)
            for group in self.groups if loads else ():
                group.extend_for_external(ask)
            return
        for group, blocks in zip(self.groups, computed, strict=True):
            if not group.is_running(ask.request_id):
                group.adopt_computed(ask, blocks)
                if loads:
                    group.extend_for_external(ask)

    def _cacheable_tokens(self, num_tokens: int, group_id: GroupId) -> int:
        """Return how many of a request's first tokens may serve a hit in a group."""
        if not self._aligns_caching:
            return num_tokens
        aligned = num_tokens - num_tokens % self._scheduler_block_tokens
        group = self.groups[group_id]
        if group.drops and aligned:
            # The block after a hit's end is looked up and given up.
            return min(num_tokens, aligned + group.block_tokens)
        return aligned

    def _resume_positions(self, request: RequestState) -> tuple[int, ...]:
        """Return where later requests resume: with the same prompt, with more, or half of it."""
        if self.config.retention_interval is None:
            return ()
        prompt, block = request.num_prompt_tokens, self._scheduler_block_tokens
        positions = [prompt - 1]
        if self._drops_any:
            ends = ((prompt - 1) // block * block, prompt // block * block)
            positions = [max(end - block, 0) for end in ends]
        if request.shared_prefix_tokens:
            positions.append(request.shared_prefix_tokens)
        return tuple(positions)
