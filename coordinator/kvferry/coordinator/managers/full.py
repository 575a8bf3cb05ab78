"""Full attention, plain or MLA, and with sink tokens: every block of a request is kept."""

from collections.abc import Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import GroupHits
from kvferry.coordinator.managers.copying import CopyingManager
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import ConfigError, InvariantError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, RequestId
from kvferry.proto.specs import SinkSpec


class FullManager(CopyingManager):
    """Hits are prefixes: the first block that is missing ends them."""

    def find_longest_hit(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        *,
        drop: bool,
    ) -> GroupHits:
        """Return the longest run of cached blocks from the first; see the base class."""
        size, unit = self.block_tokens, self.alignment_tokens
        if len(group_ids) == 1 and self._ratio == 1 and unit == size:
            # The common case of what follows: nothing to merge, to join or to align.
            blocks = self.pool.get_cached_prefix(hashes[: max_tokens // size], self.group_id)
            if drop and blocks:
                blocks.pop()
            return [blocks], len(blocks) * size
        found = [
            self.pool.get_cached_prefix(self._view(hashes)[: max_tokens // size], group_id)
            for group_id in group_ids
        ]
        num_blocks = min(len(blocks) for blocks in found)
        for blocks in found:
            del blocks[num_blocks:]
        num_tokens = num_blocks * size
        if unit < size:
            num_tokens = self._extend_inside(hashes, max_tokens, group_ids, found)
        if drop and num_tokens:
            num_tokens -= min(unit, size)
        num_tokens -= num_tokens % unit
        for blocks in found:
            del blocks[-(-num_tokens // size) :]
        return found, num_tokens

    def _extend_inside(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        found: list[list[BlockId]],
    ) -> int:
        """Add the block after a hit if it is findable inside, and return the hit's tokens."""
        unit, per_block = self.alignment_tokens, self.block_tokens // self.alignment_tokens
        first = len(found[0]) * per_block
        for end in range(min(first + per_block - 1, max_tokens // unit, len(hashes)), first, -1):
            tail = self.pool.get_cached_in_groups(hashes[end - 1], group_ids)
            if tail is not None:
                for blocks, block in zip(found, tail, strict=True):
                    blocks.append(block)
                return end * unit
        return first * unit

    def cache_blocks(
        self, request: RequestState, num_tokens: int, resume_at: tuple[int, ...]
    ) -> None:
        """Make full blocks findable, and a prompt's last block where the prompt ends in it."""
        super().cache_blocks(request, num_tokens, resume_at)
        # Whoever shares a chain looks for the ends of whole blocks only.
        if self._ratio > 1 and self.rules.caches_reachable_only and not self._shares_chain:
            self._cache_prompt_end(request, num_tokens)

    def _cache_prompt_end(self, request: RequestState, num_tokens: int) -> None:
        # The same prompt again hits all but its last token; with a drafter the whole of it is
        # looked up and the end given up then.
        limit = request.num_prompt_tokens - (not self.drops)
        end = limit // self._hash_tokens * self._hash_tokens
        position = end // self.block_tokens
        if not 0 < end <= num_tokens or end % self.block_tokens == 0:
            return
        if position < len(self._tables.get(request.request_id, ())):
            self._cache_inside(request, position, end)

    def count_common_prefix(self, request_id: RequestId) -> int:
        """Return how many blocks, from the first, all requests with blocks share."""
        num_requests = len(self._tables)
        common = 0
        for block in self._tables.get(request_id, ()):
            if self.pool.ref_count(block) != num_requests:
                break
            common += 1
        return common


class SinkManager(FullManager):
    """Full attention whose sink tokens hold blocks of the pool for ever."""

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        """Take the sink's blocks.

        Raises:
            ConfigError: the pool has fewer.

        """
        super().__init__(pool, config, group_id)
        spec = config.groups[group_id]
        if not isinstance(spec, SinkSpec):
            raise InvariantError("not a spec with sink tokens", given=spec.kind)
        num_blocks = spec.sink_tokens // self.block_tokens
        if num_blocks > pool.num_free_blocks:
            raise ConfigError(
                "the pool is smaller than the sink",
                given={"num_blocks": pool.num_blocks},
                allowed=f">= {num_blocks + 1}",
            )
        self.sink_blocks = tuple(pool.get_new_blocks(num_blocks))
