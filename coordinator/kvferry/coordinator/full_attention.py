"""The block tables of one group of full-attention layers: every block of a request is kept.

Behaves like vLLM 0.32's full-attention manager. Counts and hands out blocks; whether a request
gets any is the cache manager's decision.
"""

from collections.abc import Iterator, Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, RequestId


class FullAttention:
    """Tables of one group; `block_tokens` tokens per block, over a pool shared by all groups."""

    def __init__(self, pool: BlockPool, block_tokens: int, group_id: GroupId) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.group_id = group_id
        self._tables: dict[RequestId, list[BlockId]] = {}
        self._num_cached: dict[RequestId, int] = {}

    def table(self, request_id: RequestId) -> Sequence[BlockId]:
        """Return a request's blocks in order of its tokens; empty for an unknown request."""
        return self._tables.get(request_id, ())

    def tables(self) -> Iterator[tuple[RequestId, Sequence[BlockId]]]:
        """Yield every request with its blocks."""
        return iter(self._tables.items())

    def find_longest_hit(self, hashes: Sequence[BlockHash], max_tokens: int) -> list[BlockId]:
        """Return the cached blocks of the longest prefix of at most `max_tokens` tokens."""
        return self.pool.get_cached_prefix(hashes[: max_tokens // self.block_tokens], self.group_id)

    def count_blocks_to_allocate(
        self, request_id: RequestId, num_tokens: int, computed: Sequence[BlockId]
    ) -> int:
        """Return how many free blocks are used up when slots for `num_tokens` are granted.

        Hits that nobody references count too: touching them takes them out of the free queue.
        """
        required = -(-num_tokens // self.block_tokens)
        have = len(self._tables.get(request_id, ()))
        if request_id in self._num_cached:
            return max(required - have, 0)
        return max(required - have - len(computed), 0) + self.pool.num_free_of(computed)

    def adopt_computed(self, request_id: RequestId, computed: Sequence[BlockId]) -> None:
        """Start a request's table with its hits, referencing them.

        Raises:
            InvariantError: hits for a request that has a table already.

        """
        if request_id in self._num_cached:
            if computed:
                raise InvariantError("hits for a request that is running", given=request_id)
            return
        self.pool.touch(computed)
        self._tables[request_id] = list(computed)
        self._num_cached[request_id] = len(computed)

    def extend(self, request_id: RequestId, num_tokens: int) -> list[BlockId]:
        """Grow a table to slots for `num_tokens` tokens and return the blocks added."""
        table = self._tables.setdefault(request_id, [])
        missing = -(-num_tokens // self.block_tokens) - len(table)
        if missing <= 0:
            return []
        new = self.pool.get_new_blocks(missing)
        table.extend(new)
        return new

    def cache_blocks(
        self, request_id: RequestId, hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Make a request's full blocks within its first `num_tokens` tokens findable."""
        num_full = num_tokens // self.block_tokens
        num_cached = self._num_cached.get(request_id, 0)
        if num_full > num_cached:
            self.pool.cache_full_blocks(
                hashes, self._tables[request_id], num_cached, num_full, self.group_id
            )
            self._num_cached[request_id] = num_full

    def num_cached_blocks(self, request_id: RequestId) -> int:
        """Return how many of a request's blocks, from the first, have been made findable."""
        return self._num_cached.get(request_id, 0)

    def free(self, request_id: RequestId) -> None:
        """Give a request's blocks back, the last first. An unknown request is no error."""
        self._num_cached.pop(request_id, None)
        self.pool.free_blocks(reversed(self._tables.pop(request_id, [])))
