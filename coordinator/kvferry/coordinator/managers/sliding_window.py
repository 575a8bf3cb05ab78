"""Sliding-window attention: blocks that have left the window are given back."""

from collections.abc import Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import GroupHits, GroupManager
from kvferry.coordinator.refusals import call_refused
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupId
from kvferry.proto.specs import SlidingWindowSpec


class SlidingWindowManager(GroupManager):
    """A hit needs the blocks of one window before its end, not those before them."""

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        super().__init__(pool, config, group_id)
        spec = config.groups[group_id]
        if not isinstance(spec, SlidingWindowSpec):
            raise InvariantError("not a spec with a window", given=spec.kind)
        self._window_tokens = spec.window_tokens

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens have left the window of the next token."""
        return max(0, num_computed_tokens - self._window_tokens + 1)

    def find_longest_hit(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        *,
        drop: bool,
    ) -> GroupHits:
        """Return the last window that is cached, null blocks before it; see the base class.

        A shorter run from the very first block is a hit, too.
        """
        if self.is_dealt:
            raise call_refused(
                "context_parallel_with_sliding_window",
                "sliding-window groups cannot be dealt over ranks",
                allowed="dcp = pcp = 1",
                group=self.group_id,
            )
        view = self._view(hashes)
        num_blocks = min(max_tokens // self.block_tokens, len(view))
        found, num_hit = self._find_window(view, num_blocks, group_ids, drop)
        if drop and num_hit:
            if not self.rules.drops_once and self.block_tokens != self.alignment_tokens:
                raise call_refused(
                    "eagle_with_mixed_blocks",
                    "in this profile a drafter needs all groups to have one block size",
                    allowed=f"blocks of {self.alignment_tokens} tokens",
                    block_tokens=self.block_tokens,
                )
            num_hit = self._align(num_hit - 1)
        for blocks in found:
            del blocks[num_hit:]
        return found, num_hit * self.block_tokens

    def _find_window(
        self, view: Sequence[BlockHash], num_blocks: int, group_ids: Sequence[GroupId], drop: bool
    ) -> tuple[list[list[BlockId]], int]:
        """Return the blocks found per group, and how many positions are hit, before any drop."""
        size, need = self.block_tokens, self._blocks_for_hit(drop)
        shift = 1 if drop and self.rules.drops_once else 0
        found = [[NULL_BLOCK] * num_blocks for _ in group_ids]
        run = 0
        for i in range(num_blocks - 1, -1, -1):
            cached = self.pool.get_cached_in_groups(view[i], group_ids)
            if cached is None:
                run = 0
                continue
            if not run and (i + 1 - shift) * size % self.alignment_tokens:
                continue
            for blocks, block in zip(found, cached, strict=True):
                blocks[i] = block
            run += 1
            if run >= need:
                return found, i + run
        return found, self._align(run)

    def _align(self, num_blocks: int) -> int:
        """Shorten a hit until it ends where every group can have one."""
        while num_blocks * self.block_tokens % self.alignment_tokens:
            num_blocks -= 1
        return num_blocks

    def _blocks_for_hit(self, drop: bool) -> int:
        return -(-(self._window_tokens - 1) // self.block_tokens) + (1 if drop else 0)

    def _reachable(
        self, request: RequestState, start: int, end: int, resume_at: tuple[int, ...]
    ) -> list[bool] | None:
        """Keep the windows before every position at which a hit can end."""
        size, interval = self.block_tokens, self._retention_interval
        if self.alignment_tokens % size:
            return None
        need, shift = self._blocks_for_hit(self.drops), int(self.drops)
        mask = [False] * (end - start)
        if interval != 0:
            per_segment = (self.alignment_tokens if interval is None else interval) // size
            if need >= per_segment:
                return None
            mask = [
                i >= shift and (i - shift) % per_segment >= per_segment - need
                for i in range(start, end)
            ]
        if interval is not None:
            for boundary in resume_at:
                last = boundary // self.alignment_tokens * self.alignment_tokens // size + shift
                for i in range(max(start, last - need), min(end, last)):
                    mask[i - start] = True
        return mask
