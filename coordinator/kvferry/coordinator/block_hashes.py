"""What each block of a pool holds, and which block holds a hash: both directions of one relation.

Decides nothing about who owns a block. Used by `block_pool` only.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import cast

from kvferry.coordinator.hash_index import HashIndex
from kvferry.coordinator.pool_events import Removed
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupedHash, GroupId, pack_group


class BlockHashes:
    """The hashes that blocks carry, and an index of them per group.

    A block carries the hash of what it holds, in one group, and may carry hashes of positions
    inside it beside that one. `carried[block]` is the first one, None where there is none.
    `parents[block]` is the hash before it in its chain, None where that was not told; what a block
    that carries nothing has there does not count.
    """

    def __init__(self, num_blocks: int) -> None:
        self.carried: list[BlockHash | None] = [None] * num_blocks
        self.parents: list[BlockHash | None] = [None] * num_blocks
        self._indexes: dict[GroupId, HashIndex] = {}
        # The group of a block's hashes; empty while there is only one group.
        self._groups = array("I")
        # Hashes beside the first one, and how many tokens of a block the first one covers where
        # that is not the whole block: both are rare.
        self._more: dict[BlockId, list[BlockHash]] = {}
        self._covered_tokens: dict[BlockId, int] = {}

    def __len__(self) -> int:
        """Count distinct hashes over all groups."""
        return sum(len(index) for index in self._indexes.values())

    def num_blocks(self) -> int:
        """Return how many blocks carry a hash; one that carries several counts as often."""
        return sum(index.num_blocks() for index in self._indexes.values())

    def find(self, block_hash: BlockHash, group_id: GroupId) -> BlockId | None:
        """Return the oldest block of a hash in a group, or None."""
        index = self._indexes.get(group_id)
        return None if index is None else index.find(block_hash)

    def find_prefix(self, hashes: Iterable[BlockHash], group_id: GroupId) -> list[BlockId]:
        """Return the oldest blocks of the longest run of hashes, from the first, that is held."""
        index = self._indexes.get(group_id)
        return [] if index is None else index.find_prefix(hashes)

    def keys_of(self, block: BlockId) -> tuple[GroupedHash, ...]:
        """Return every key a block is found under, that of the hash it carries first."""
        return tuple(pack_group(held, self._group_of(block)) for held in self._hashes_of(block))

    def items(self) -> Iterator[tuple[GroupedHash, tuple[BlockId, ...]]]:
        """Yield every key with its blocks, oldest copy first."""
        for group_id, index in self._indexes.items():
            for block_hash, blocks in index.items():
                yield pack_group(block_hash, group_id), blocks

    # --- changing ----------------------------------------------------------------------------

    def hold(
        self,
        hashes: Sequence[BlockHash],
        blocks: list[BlockId],
        group_id: GroupId,
        parents: Iterable[BlockHash | None],
    ) -> list[Removed]:
        """Let distinct blocks carry the hashes at their positions, each of a whole block.

        `parents` are the hashes before them, None where one is not known.

        Returns:
            What blocks that were findable at a position inside them have lost.

        Raises:
            InvariantError: a block carries the hash of a whole block already, or is the null
                block; nothing has changed then.

        """
        carried = self.carried
        removed: list[Removed] = []
        if NULL_BLOCK in blocks:
            raise InvariantError("block cannot take another hash", given=NULL_BLOCK)
        before = [carried[block] for block in blocks]
        if any(before):
            taken = [block for block in blocks if carried[block] is not None]
            for block in taken:
                if block not in self._covered_tokens:
                    raise InvariantError("block cannot take another hash", given=block)
            removed = self.forget(taken)
        before_it = self.parents
        for block, block_hash, parent in zip(blocks, hashes, parents, strict=True):
            carried[block] = block_hash
            before_it[block] = parent
        self._index_of(group_id, blocks).insert(hashes, blocks)
        return removed

    def hold_inside(
        self,
        block_hash: BlockHash,
        block: BlockId,
        group_id: GroupId,
        *,
        covered_tokens: int,
        block_tokens: int,
    ) -> tuple[bool, list[Removed]]:
        """Let a block carry a hash that covers `covered_tokens` of its `block_tokens` tokens.

        What it carries is forgotten if it covers less, and kept beside otherwise.

        Returns:
            Whether that is new, and what was forgotten for it.

        """
        removed: list[Removed] = []
        if block_hash in self._hashes_of(block):
            return False, removed
        if self._covered_tokens.get(block, block_tokens) < covered_tokens:
            removed = self.forget([block])
        if self.carried[block] is None:
            self.carried[block], self.parents[block] = block_hash, None
            if covered_tokens < block_tokens:
                self._covered_tokens[block] = covered_tokens
        else:
            self._more.setdefault(block, []).append(block_hash)
        self._index_of(group_id, [block]).insert([block_hash], [block])
        return True, removed

    def move(self, source: BlockId, target: BlockId) -> None:
        """Let a block carry what another one does, in its place.

        Raises:
            InvariantError: it carries a hash already.

        """
        if self.carried[target] is not None:
            raise InvariantError("block cannot take another hash", given=target)
        hashes = self._hashes_of(source)
        if not hashes:
            return
        index = self._index_of(self._group_of(source), [target])
        index.drop(hashes, [source] * len(hashes))
        index.insert(hashes, [target] * len(hashes))
        self.carried[target], self.carried[source] = self.carried[source], None
        self.parents[target] = self.parents[source]
        if source in self._more:
            self._more[target] = self._more.pop(source)
        if source in self._covered_tokens:
            self._covered_tokens[target] = self._covered_tokens.pop(source)

    def forget(self, blocks: list[BlockId]) -> list[Removed]:
        """Forget what distinct blocks carry, in the given order, and return what that was.

        Blocks that carry nothing are no error.
        """
        carried = self.carried
        hashes = [carried[block] for block in blocks]
        if not all(hashes):
            blocks = [block for block in blocks if carried[block] is not None]
            hashes = [carried[block] for block in blocks]
        held = cast("list[BlockHash]", hashes)
        if self._more or self._covered_tokens:
            blocks, held = self._with_more(blocks)
        for block in blocks:
            carried[block] = None
        removed: list[Removed] = []
        for index, run, run_hashes in self._by_group(blocks, held):
            index.drop(run_hashes, run)
            removed.append(Removed(tuple(run), tuple(run_hashes), index.group_id))
        return removed

    # --- inside ------------------------------------------------------------------------------

    def _hashes_of(self, block: BlockId) -> list[BlockHash]:
        first = self.carried[block]
        return [] if first is None else [first, *self._more.get(block, ())]

    def _group_of(self, block: BlockId) -> GroupId:
        return GroupId(self._groups[block]) if self._groups else next(iter(self._indexes))

    def _index_of(self, group_id: GroupId, blocks: Iterable[BlockId]) -> HashIndex:
        """Return the index of a group, to which blocks belong from now on."""
        index = self._indexes.get(group_id)
        if index is None:
            index = self._indexes[group_id] = HashIndex(group_id)
            if len(self._indexes) == 2:
                # Whatever carries a hash until now is of the first group.
                self._groups = array("I", [next(iter(self._indexes))]) * len(self.carried)
        if self._groups:
            groups = self._groups
            for block in blocks:
                groups[block] = group_id
        return index

    def _with_more(self, blocks: Iterable[BlockId]) -> tuple[list[BlockId], list[BlockHash]]:
        """Return every hash of blocks, each with its block; positions inside are forgotten."""
        pairs = [(block, held) for block in blocks for held in self._hashes_of(block)]
        for block, _ in pairs:
            self._more.pop(block, None)
            self._covered_tokens.pop(block, None)
        return [block for block, _ in pairs], [held for _, held in pairs]

    def _by_group(
        self, blocks: list[BlockId], hashes: list[BlockHash]
    ) -> Iterator[tuple[HashIndex, list[BlockId], list[BlockHash]]]:
        """Yield the runs of blocks that belong to one group, with their hashes."""
        if not blocks:
            return
        if not self._groups:
            (index,) = self._indexes.values()
            yield index, blocks, hashes
            return
        start = 0
        for group_id, run in groupby(blocks, self._groups.__getitem__):
            end = start + len(list(run))
            yield self._indexes[GroupId(group_id)], blocks[start:end], hashes[start:end]
            start = end
