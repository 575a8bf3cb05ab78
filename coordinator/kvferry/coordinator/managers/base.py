"""The block tables of one cache group, and all that most kinds of attention do alike.

A manager counts, hands out and gives back blocks of its group; whether a request gets any is the
cache manager's decision.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.event_content import describe_run
from kvferry.coordinator.hash_view import view_at
from kvferry.coordinator.pool_events import GroupOrigin, StoredContent
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError, InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, RequestId

GroupHits = tuple[list[list[BlockId]], int]
"""Cached blocks per group of a joint lookup, null where one is skipped; and the hit's tokens."""


class SlotAsk(NamedTuple):
    """What a request asks slots for, all counts in tokens from its start.

    `local_tokens` are computed or hit here; `computed_tokens` counts external ones, too;
    `main_tokens` those to be computed now; `slot_tokens` a drafter's lookahead, and no more than
    the model's limit. `capped`: count no more than a group holds at once.
    """

    request_id: RequestId
    local_tokens: int
    computed_tokens: int
    main_tokens: int
    slot_tokens: int
    encoder_tokens: int = 0
    capped: bool = False


class GroupManager(ABC):
    """Tables of one group over a pool shared by all groups.

    `block_tokens` is what one block id covers over all ranks; hits are multiples of
    `alignment_tokens`; with `drops` the end of every hit must be recomputed for a drafter. The
    tokens of a group that `is_dealt` lie on several ranks.
    """

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        spec = config.groups[group_id]
        self.pool = pool
        self.group_id = group_id
        self.rules = config.rules
        self.block_tokens = config.block_tokens_of(group_id)
        self.alignment_tokens = config.alignment_tokens
        self.drops = config.drops_in(group_id)
        self.is_dealt = config.dcp * config.pcp > 1 and config.deals(spec)
        self._hash_tokens = config.hash_block_tokens
        self._ratio = max(self.block_tokens // config.hash_block_tokens, 1)
        self._view_format = config.view_format
        self._shares_chain = config.shared_chain
        self._retention_interval = config.retention_interval
        self._max_held_blocks = config.max_held_blocks(group_id)
        self.origin = GroupOrigin(spec.event_kind, spec.window_tokens_in_events)
        self._tables: dict[RequestId, list[BlockId]] = {}
        self._num_cached: dict[RequestId, int] = {}

    # --- reading -----------------------------------------------------------------------------

    def table(self, request_id: RequestId) -> Sequence[BlockId]:
        """Return a request's blocks in order of its tokens; empty for an unknown request."""
        return self._tables.get(request_id, ())

    def tables(self) -> Iterator[tuple[RequestId, Sequence[BlockId]]]:
        """Yield every request with its blocks."""
        return iter(self._tables.items())

    def num_cached_blocks(self, request_id: RequestId) -> int:
        """Return how many of a request's blocks, from the first, have been made findable."""
        return self._num_cached.get(request_id, 0)

    def is_running(self, request_id: RequestId) -> bool:
        """Tell whether a request took its hits, or had blocks made findable."""
        return request_id in self._num_cached

    def count_common_prefix(self, request_id: RequestId) -> int:
        """Return how many blocks, from the first, all requests with blocks share."""
        return 0

    @abstractmethod
    def find_longest_hit(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        *,
        drop: bool,
    ) -> GroupHits:
        """Return the longest prefix of at most `max_tokens` tokens cached in all of `group_ids`.

        The groups' specs are equal to this manager's. `drop`: leave out the end that a drafter
        needs recomputed.

        Raises:
            BadInputError: this kind cannot be looked up in this configuration.

        """

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens, from the first, no later token attends to."""
        return 0

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Return how many blocks, from the first, no later token attends to."""
        return max(self.skipped_tokens(num_computed_tokens), 0) // self.block_tokens

    def max_blocks_held(self, num_tokens: int) -> int:
        """Return the most blocks of this group that a request of so many tokens holds at once."""
        whole = -(-num_tokens // self.block_tokens)
        return whole if self._max_held_blocks is None else min(whole, self._max_held_blocks)

    def count_blocks_to_allocate(self, ask: SlotAsk, computed: Sequence[BlockId]) -> int:
        """Return how many free blocks are used up when the slots are granted.

        Hits that nobody references count too: touching them takes them out of the free queue.

        Raises:
            InvariantError: hits for a request that is running.

        """
        required = -(-ask.slot_tokens // self.block_tokens)
        if ask.capped:
            required = self.max_blocks_held(ask.slot_tokens)
        have = len(self._tables.get(ask.request_id, ()))
        if ask.request_id in self._num_cached:
            if computed:
                raise InvariantError("hits for a request that is running", given=ask.request_id)
            return max(required - have, 0)
        skipped = self.skipped_tokens(ask.computed_tokens) // self.block_tokens
        new = max(required - max(skipped, have + len(computed)), 0)
        if self._ends_inside(ask, computed):
            new += 1
        return new + self.pool.num_free_of(computed[max(skipped - have, 0) :])

    # --- changing ----------------------------------------------------------------------------

    def adopt_computed(self, ask: SlotAsk, computed: Sequence[BlockId]) -> None:
        """Start a request's table with its hits, referencing those it still attends to.

        Raises:
            InvariantError: the request has a table already.

        """
        if self._tables.get(ask.request_id):
            raise InvariantError("hits for a request that is running", given=ask.request_id)
        skipped = max(self.skipped_tokens(ask.computed_tokens), 0) // self.block_tokens
        kept = computed[skipped:]
        self.pool.touch(kept)
        table = [NULL_BLOCK] * skipped
        table += kept
        self._tables[ask.request_id] = table
        self._num_cached[ask.request_id] = len(table)

    def restore(
        self,
        request: RequestState,
        table: Sequence[BlockId],
        num_cacheable: int,
        resume_at: tuple[int, ...],
    ) -> None:
        """Start the table of a request that computes already, referencing its blocks.

        What it no longer attends to is left out. Those full blocks of its first `num_cacheable`
        tokens become findable that are not yet; `resume_at` as in `cache_blocks`.
        """
        skipped = self.num_skipped_blocks(request.num_computed_tokens)
        kept = [*[NULL_BLOCK] * skipped, *table[skipped:]]
        self.pool.claim(kept[skipped:])
        num_full = num_cacheable // self.block_tokens
        self._tables[request.request_id] = kept
        self._num_cached[request.request_id] = num_full
        positions = self._findable_positions(request, kept, (0, num_full), resume_at)
        if positions is None:
            positions = list(range(num_full))
        missing = [i for i in positions if self.pool.key_of(kept[i]) is None]
        if missing:
            self._make_findable(request, missing[0], missing[-1] + 1, missing)

    def extend_for_external(self, ask: SlotAsk) -> None:
        """Grow a table to slots for tokens that are loaded, as far as they are attended to.

        Raises:
            InvariantError: the pool has fewer blocks (the caller must have counted).

        """
        skipped = max(self.skipped_tokens(ask.computed_tokens), 0)
        if skipped < self.block_tokens and not self.rules.touches_before_loads:
            skipped = 0
        if min(ask.computed_tokens - skipped, ask.computed_tokens - ask.local_tokens) > 0:
            self._grow(ask.request_id, ask.computed_tokens)

    def extend(self, ask: SlotAsk) -> list[BlockId]:
        """Grow a table to the slots asked for and return the blocks added.

        Raises:
            InvariantError: the pool has fewer blocks (the caller must have counted).

        """
        return self._grow(ask.request_id, ask.slot_tokens)

    def cache_blocks(
        self, request: RequestState, num_tokens: int, resume_at: tuple[int, ...]
    ) -> None:
        """Make a request's full blocks within its first `num_tokens` tokens findable.

        `resume_at`: token positions at which a later request may resume, kept even where the
        positions around them are not.
        """
        num_full = num_tokens // self.block_tokens
        num_cached = self._num_cached.get(request.request_id, 0)
        if num_full <= num_cached:
            return
        table = self._tables.get(request.request_id, [])
        positions = self._findable_positions(request, table, (num_cached, num_full), resume_at)
        self._make_findable(request, num_cached, num_full, positions)
        self._num_cached[request.request_id] = num_full

    def remove_skipped(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Give back the blocks that no token after the computed ones attends to."""
        skipped = self.skipped_tokens(num_computed_tokens)
        if skipped > 0:
            self._retire(request_id, skipped // self.block_tokens)

    def check_truncate(self, request_id: RequestId, num_tokens: int) -> None:
        """Refuse to roll back to where this group cannot go on computing.

        Raises:
            BadInputError: the last block needed was given back, or others read the block that
                would be overwritten.

        """
        table = self._tables.get(request_id, [])
        last = -(-num_tokens // self.block_tokens) - 1
        if not 0 <= last < len(table):
            return
        whole = num_tokens % self.block_tokens == 0
        first = self.skipped_tokens(num_tokens) // self.block_tokens
        if NULL_BLOCK in table[max(first, 0) : last + 1]:
            raise BadInputError(
                f"request {request_id} cannot be rolled back: its blocks there were given back",
                given={"num_tokens": num_tokens, "group": self.group_id},
            )
        if not whole and self.pool.ref_count(table[last]) > 1:
            raise BadInputError(
                f"request {request_id} cannot be rolled back into a block that others use",
                given={"num_tokens": num_tokens, "group": self.group_id},
                allowed=f"a multiple of {self.block_tokens}",
            )

    def truncate(self, request_id: RequestId, num_tokens: int) -> None:
        """Give the blocks after `num_tokens` tokens back; see `check_truncate`.

        A block that stays and is no longer full cannot be found any more: it is written anew.
        """
        table = self._tables.get(request_id, [])
        num_full, keep = num_tokens // self.block_tokens, -(-num_tokens // self.block_tokens)
        self.pool.free_blocks(reversed(table[keep:]))
        del table[keep:]
        self.pool.evict_blocks(table[num_full:])
        if request_id in self._num_cached:
            self._num_cached[request_id] = min(self._num_cached[request_id], num_full)

    def free(self, request_id: RequestId) -> None:
        """Give a request's blocks back, the last first. An unknown request is no error."""
        self._num_cached.pop(request_id, None)
        self.pool.free_blocks(reversed(self._tables.pop(request_id, [])))

    def start_step(self) -> None:
        """Take notice that the blocks indexed so far are written."""
        return

    def take_copies(self) -> list[tuple[BlockId, BlockId]]:
        """Return the (source, target) copies that must be made before this step computes."""
        return []

    # --- for the kinds -----------------------------------------------------------------------

    def _make_findable(
        self, request: RequestState, start: int, end: int, positions: Sequence[int] | None
    ) -> None:
        """Make blocks `[start, end)` of a request's table findable, None: at all positions."""
        self.pool.cache_full_blocks(
            self._view(request.hashes),
            self._tables.get(request.request_id, []),
            start,
            end,
            self.group_id,
            positions=positions,
            block_tokens=self.block_tokens,
            origin=self.origin,
            content=self._describe(request, start, end, positions),
        )

    def _view(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return view_at(hashes, self._ratio, self._view_format)

    def _ends_inside(self, ask: SlotAsk, computed: Sequence[BlockId]) -> bool:
        """Tell whether the hits end inside a block, which then must be copied before it grows."""
        return bool(computed) and ask.local_tokens % self.block_tokens != 0

    def _grow(self, request_id: RequestId, num_tokens: int) -> list[BlockId]:
        table = self._tables.setdefault(request_id, [])
        missing = -(-num_tokens // self.block_tokens) - len(table)
        if missing <= 0:
            return []
        new = self.pool.get_new_blocks(missing)
        table += new
        return new

    def _retire(self, request_id: RequestId, num_skipped: int) -> None:
        """Give blocks `[0, num_skipped)` back, from the last one down to the first gap."""
        table = self._tables.get(request_id)
        if not table:
            return
        removed: list[BlockId] = []
        for i in range(min(num_skipped, len(table)) - 1, -1, -1):
            if table[i] == NULL_BLOCK:
                break
            removed.append(table[i])
            table[i] = NULL_BLOCK
        if removed:
            self.pool.free_blocks(removed)

    def _reachable(
        self, request: RequestState, start: int, end: int, resume_at: tuple[int, ...]
    ) -> list[bool] | None:
        """Tell for blocks `[start, end)` whether a lookup can end there, None: every one."""
        return None

    def _findable_positions(
        self,
        request: RequestState,
        table: Sequence[BlockId],
        run: tuple[int, int],
        resume_at: tuple[int, ...],
    ) -> list[int] | None:
        """Return the positions of a run that hold a block worth finding, None: all of them."""
        start, end = run
        mask = None
        if self.rules.caches_reachable_only:
            mask = self._reachable(request, start, end, resume_at)
        if mask is None:
            if NULL_BLOCK not in table[start:end]:
                return None
            return [i for i in range(start, end) if table[i] != NULL_BLOCK]
        return [i for i in range(start, end) if mask[i - start] and table[i] != NULL_BLOCK]

    def _describe(
        self, request: RequestState, start: int, end: int, positions: Sequence[int] | None
    ) -> StoredContent | None:
        if request.content is None or not self.pool.record_events:
            return None
        size = self.block_tokens
        blocks = range(start, end) if positions is None else positions
        return describe_run(
            request.content,
            self.rules.key_format,
            (start * size, end * size),
            [(i * size, (i + 1) * size) for i in blocks],
        )
