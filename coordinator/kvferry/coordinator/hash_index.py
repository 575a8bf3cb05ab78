"""Which block holds which hash, in one cache group; several may hold the same.

Decides nothing: the block pool tells it what is held.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvferry.proto.ids import BlockHash, BlockId, GroupId


class HashIndex:
    """Hash -> the blocks that hold it, oldest first.

    Keyed by the caller's own hash objects: nothing is built per block, and a hash object that was
    looked up before remembers where it belongs.
    """

    def __init__(self, group_id: GroupId) -> None:
        self.group_id = group_id
        self._oldest: dict[BlockHash, BlockId] = {}
        # Further blocks of a hash, in order: duplicates are rare, and a container per hash would
        # be most of the index's memory.
        self._copies: dict[BlockHash, dict[BlockId, None]] = {}
        self.find = self._oldest.get
        """Returns the oldest block of a hash, or None."""

    def __len__(self) -> int:
        return len(self._oldest)

    def num_blocks(self) -> int:
        """Return how many blocks hold a hash."""
        return len(self._oldest) + sum(map(len, self._copies.values()))

    def items(self) -> Iterator[tuple[BlockHash, tuple[BlockId, ...]]]:
        """Yield every hash with its blocks, oldest first."""
        for block_hash, block in self._oldest.items():
            yield block_hash, (block, *self._copies.get(block_hash, ()))

    def find_prefix(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Return the oldest blocks of the longest run of hashes, from the first, that is held."""
        found: list[BlockId] = []
        for block in map(self.find, hashes):
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, hashes: Iterable[BlockHash], blocks: Sequence[BlockId]) -> None:
        """Add blocks, none of which holds the hash at its position already."""
        oldest = list(map(self._oldest.setdefault, hashes, blocks))
        if oldest != blocks:
            for block_hash, first, block in zip(hashes, oldest, blocks, strict=True):
                if first != block:
                    self._copies.setdefault(block_hash, {})[block] = None

    def drop(self, hashes: Iterable[BlockHash], blocks: Iterable[BlockId]) -> None:
        """Forget blocks, each of which holds the hash at its position."""
        if self._copies:
            for block_hash, block in zip(hashes, blocks, strict=True):
                self._drop_one(block_hash, block)
            return
        oldest = self._oldest
        for block_hash in hashes:
            del oldest[block_hash]

    def _drop_one(self, block_hash: BlockHash, block: BlockId) -> None:
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._oldest[block_hash]
            return
        if self._oldest[block_hash] == block:
            block = next(iter(copies))
            self._oldest[block_hash] = block
        del copies[block]
        if not copies:
            del self._copies[block_hash]
