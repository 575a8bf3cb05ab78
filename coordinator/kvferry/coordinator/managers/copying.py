"""Hits that end inside a block: the block is shared, so it is copied before it is written on."""

from collections.abc import Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.event_content import describe_run
from kvferry.coordinator.managers.base import GroupManager, SlotAsk
from kvferry.coordinator.pool_events import Stored
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockId, GroupedHash, GroupId, RequestId, pack_group


class CopyingManager(GroupManager):
    """Keeps who must copy which block, and the copies that wait to be made.

    Both ends of a copy keep a reference of their own until the caller has made it.
    """

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        super().__init__(pool, config, group_id)
        self._to_copy: dict[RequestId, tuple[int, BlockId]] = {}
        self._copies: list[tuple[BlockId, BlockId]] = []

    def adopt_computed(self, ask: SlotAsk, computed: Sequence[BlockId]) -> None:
        """Start a request's table with its hits; the last block may have to be copied."""
        super().adopt_computed(ask, computed)
        if self._ends_inside(ask, computed):
            position = ask.local_tokens // self.block_tokens
            self._to_copy[ask.request_id] = (position, computed[-1])
            # The copy is indexed anew once it is full.
            self._num_cached[ask.request_id] = position

    def extend(self, ask: SlotAsk) -> list[BlockId]:
        """Grow a table, copying a shared last block first; returns the blocks added."""
        to_copy = self._to_copy.pop(ask.request_id, None) if self._to_copy else None
        if to_copy is None:
            return self._grow(ask.request_id, ask.slot_tokens)
        (copy,) = self.pool.get_new_blocks(1)
        self._redirect(ask.request_id, to_copy[0], copy)
        return [copy, *self._grow(ask.request_id, ask.slot_tokens)]

    def free(self, request_id: RequestId) -> None:
        """Give a request's blocks back, the last first. An unknown request is no error."""
        self._to_copy.pop(request_id, None)
        super().free(request_id)

    def take_copies(self) -> list[tuple[BlockId, BlockId]]:
        """Return the (source, target) copies that must be made before this step computes."""
        copies, self._copies = self._copies, []
        return copies

    def _redirect(self, request_id: RequestId, position: int, target: BlockId) -> None:
        """Put a private copy into a table, in place of the shared block there."""
        table = self._tables[request_id]
        source = table[position]
        table[position] = target
        # The request's reference to the source now belongs to the copy that waits.
        self.pool.touch((target,))
        self._copies.append((source, target))

    def _cache_inside(self, request: RequestState, position: int, num_tokens: int) -> GroupedHash:
        """Make a block findable at `num_tokens`, a position inside it or its end."""
        unit = self._hash_tokens
        number = num_tokens // unit
        if number > len(request.hashes):
            raise InvariantError(
                "fewer hashes than tokens to be found",
                given=len(request.hashes),
                allowed=f">= {number}",
            )
        block = self._tables[request.request_id][position]
        block_hash = request.hashes[number - 1]
        is_new = self.pool.cache_inside(
            block_hash,
            block,
            self.group_id,
            covered_tokens=num_tokens - position * self.block_tokens,
            block_tokens=self.block_tokens,
        )
        if is_new:
            content = None
            if request.content is not None and self.pool.record_events:
                run = (num_tokens - unit, num_tokens)
                content = describe_run(request.content, self.rules.key_format, run, [run])
            parent = request.hashes[number - 2] if number > 1 else None
            self.pool.tell_stored(
                Stored((block,), (block_hash,), self.group_id, parent, unit, self.origin, content)
            )
        return pack_group(block_hash, self.group_id)
