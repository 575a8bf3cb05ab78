"""Chunked local attention: the blocks of earlier chunks are given back."""

from collections.abc import Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import GroupHits, GroupManager
from kvferry.coordinator.refusals import call_refused
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, GroupId
from kvferry.proto.specs import ChunkedLocalSpec


class ChunkedLocalManager(GroupManager):
    """Whatever lies before the chunk of the next token counts as hit without a look."""

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        super().__init__(pool, config, group_id)
        spec = config.groups[group_id]
        if not isinstance(spec, ChunkedLocalSpec):
            raise InvariantError("not a spec with chunks", given=spec.kind)
        self._chunk_tokens = spec.chunk_tokens

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens lie before the chunk of the next token."""
        return num_computed_tokens // self._chunk_tokens * self._chunk_tokens

    def find_longest_hit(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        *,
        drop: bool,
    ) -> GroupHits:
        """Return null blocks for earlier chunks, then what is cached; see the base class."""
        self._refuse_lookup(drop)
        size = self.block_tokens
        first = self.skipped_tokens(max_tokens) // size
        found = [[NULL_BLOCK] * first for _ in group_ids]
        for block_hash in self._view(hashes)[first : max_tokens // size]:
            cached = self.pool.get_cached_in_groups(block_hash, group_ids)
            if cached is None:
                break
            for blocks, block in zip(found, cached, strict=True):
                blocks.append(block)
        return found, len(found[0]) * size

    def _refuse_lookup(self, drop: bool) -> None:
        if drop:
            raise call_refused(
                "eagle_with_chunked_local",
                "chunked local groups cannot serve a drafter",
                allowed="use_eagle = False",
                group=self.group_id,
            )
        if self.is_dealt:
            raise call_refused(
                "context_parallel_with_chunked_local",
                "chunked local groups cannot be dealt over ranks",
                allowed="dcp = pcp = 1",
                group=self.group_id,
            )
        if self.block_tokens != self.alignment_tokens:
            raise call_refused(
                "chunked_local_needs_common_block",
                "chunked local groups need all groups to have one block size",
                allowed=f"blocks of {self.alignment_tokens} tokens",
                block_tokens=self.block_tokens,
            )
