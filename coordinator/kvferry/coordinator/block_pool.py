"""One instance's blocks: who references them, which are free, and which hash each one carries.

Decides which block is evicted next; knows nothing of requests.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from kvferry.coordinator.free_queue import FreeQueue
from kvferry.coordinator.pool_events import (
    Cleared,
    GroupOrigin,
    PoolEvent,
    Removed,
    Stored,
    StoredContent,
)
from kvferry.coordinator.refusals import call_refused
from kvferry.proto.errors import ConfigError, InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupedHash, GroupId, pack_group

# One block under a key is stored as its bare id, several as an insertion-ordered dict: duplicates
# are rare, and a dict per key would be most of the index's memory.
_Entry = BlockId | dict[BlockId, None]


class BlockPool:
    """Ref counts, free queue and hash index of `num_blocks` blocks.

    Block 0 is the null block: it is never free, never cached and never freed. Two blocks with
    equal content are both kept, because block tables are append-only. A block carries the key of
    what it holds, and may carry keys of positions inside it beside that one.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        *,
        unhashed_first: bool = True,
        record_events: bool = True,
    ) -> None:
        """Make a pool whose blocks `1 .. num_blocks - 1` are free, in ascending order.

        `unhashed_first`: freed blocks without a hash are reused before all others.
        `record_events`: `take_events` tells what enters and leaves the index.

        Raises:
            ConfigError: `num_blocks` is not an integer of at least 1.

        """
        if type(num_blocks) is not int or num_blocks < 1:
            raise ConfigError(
                "num_blocks must be a positive integer", given=repr(num_blocks), allowed=">= 1"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.record_events = record_events
        self.num_refused_frees = 0
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._keys: list[GroupedHash | None] = [None] * num_blocks
        self._index: dict[GroupedHash, _Entry] = {}
        # Keys beside the first one, and how many tokens of a block the first one covers where
        # that is not the whole block: both are rare.
        self._more_keys: dict[BlockId, list[GroupedHash]] = {}
        self._covered_tokens: dict[BlockId, int] = {}
        self._unhashed_first = unhashed_first
        self._suffixes: dict[GroupId, bytes] = {}
        self._free = FreeQueue(num_blocks)
        self._free.remove(NULL_BLOCK)
        self._events: list[PoolEvent] = []

    # --- reading -----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks with a reference (the null block is not counted)."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_keys(self) -> int:
        """Distinct keys in the index (duplicates of one key count once)."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Referenced share of the usable blocks, 0 to 1."""
        usable = self.num_blocks - 1
        return 1.0 - len(self._free) / usable if usable else 0.0

    def free_order(self) -> Iterator[BlockId]:
        """Yield the free blocks, first to be reused first."""
        return iter(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        """Return how many owners a block has."""
        return self._ref_counts[block_id]

    def key_of(self, block_id: BlockId) -> GroupedHash | None:
        """Return the key a block carries, or None."""
        return self._keys[block_id]

    def keys_of(self, block_id: BlockId) -> tuple[GroupedHash, ...]:
        """Return every key a block is found under, the one it carries first."""
        key = self._keys[block_id]
        return () if key is None else (key, *self._more_keys.get(block_id, ()))

    def index_items(self) -> Iterator[tuple[GroupedHash, tuple[BlockId, ...]]]:
        """Yield every key with its blocks, oldest copy first."""
        for key, entry in self._index.items():
            yield key, tuple(entry) if isinstance(entry, dict) else (entry,)

    def num_free_of(self, block_ids: Iterable[BlockId]) -> int:
        """Count those of the blocks that touching would take out of the free queue."""
        counts = self._ref_counts
        return sum(1 for block in block_ids if not counts[block] and block != NULL_BLOCK)

    def get_cached_block(self, block_hash: BlockHash, group_id: GroupId) -> BlockId | None:
        """Return the oldest block of a hash in a group, or None."""
        entry = self._index.get(pack_group(block_hash, group_id))
        return next(iter(entry)) if isinstance(entry, dict) else entry

    def get_cached_prefix(self, hashes: Iterable[BlockHash], group_id: GroupId) -> list[BlockId]:
        """Return the blocks of the longest run of `hashes`, from the first, that is cached."""
        suffix = self._suffixes.get(group_id) or self._make_suffix(group_id)
        # A call of `GroupedHash` per block would cost as much as the look itself.
        get = cast("Callable[[bytes], _Entry | None]", self._index.get)
        found: list[BlockId] = []
        for block_hash in hashes:
            entry = get(block_hash + suffix)
            if entry is None:
                break
            found.append(next(iter(entry)) if isinstance(entry, dict) else entry)
        return found

    def get_cached_in_groups(
        self, block_hash: BlockHash, group_ids: Iterable[GroupId]
    ) -> list[BlockId] | None:
        """Return the oldest block of a hash in each group, None if one group has none."""
        found: list[BlockId] = []
        for group_id in group_ids:
            block = self.get_cached_block(block_hash, group_id)
            if block is None:
                return None
            found.append(block)
        return found

    # --- owning ------------------------------------------------------------------------------

    def get_new_blocks(self, count: int) -> list[BlockId]:
        """Hand out blocks with one reference each; what they had cached is forgotten.

        Raises:
            InvariantError: fewer are free (the caller must have counted); nothing is taken then.

        """
        taken = self._free.popleft_n(count)
        counts, keys = self._ref_counts, self._keys
        for block in taken:
            if keys[block] is not None:
                self._forget(block)
            counts[block] = 1
        return taken

    def touch(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each block, taking unreferenced ones out of the free queue."""
        counts, remove = self._ref_counts, self._free.remove
        for block in block_ids:
            if block == NULL_BLOCK:
                continue
            if not counts[block]:
                remove(block)
            counts[block] += 1

    def free_blocks(self, ordered: Iterable[BlockId]) -> None:
        """Take one reference from each block; the first given is to be reused first.

        Callers pass a request's table tail first, so that chains are evicted from their end.
        With `unhashed_first`, blocks without a hash go to the front of the queue: nothing is lost
        by reusing them.
        A block that has no reference left, and the null block, are refused and counted in
        `num_refused_frees`; the rest of the list is freed all the same.
        """
        counts, keys, first = self._ref_counts, self._keys, self._unhashed_first
        hashed: list[BlockId] = []
        unhashed: list[BlockId] = []
        for block in ordered:
            count = counts[block]
            if count <= 0:
                self.num_refused_frees += 1
                continue
            counts[block] = count - 1
            if count == 1:
                (unhashed if first and keys[block] is None else hashed).append(block)
        self._free.prepend_n(unhashed)
        self._free.append_n(hashed)

    # --- finding -----------------------------------------------------------------------------

    def cache_full_blocks(
        self,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        num_cached: int,
        num_full: int,
        group_id: GroupId,
        *,
        positions: Sequence[int] | None = None,
        block_tokens: int = 0,
        origin: GroupOrigin | None = None,
        content: StoredContent | None = None,
    ) -> None:
        """Make blocks `[num_cached, num_full)` of a table findable under the hashes there.

        `positions` names those of the range that are meant, None: all. A block that was findable
        at a position inside it only loses that. The rest is told in the event.

        Raises:
            InvariantError: hashes or blocks are missing, or a block carries the hash of a whole
                block already; nothing is made findable then.

        """
        if num_cached >= num_full:
            return
        if len(hashes) < num_full or len(block_ids) < num_full:
            raise InvariantError(
                "fewer hashes or blocks than full blocks",
                given={"hashes": len(hashes), "blocks": len(block_ids)},
                allowed=f">= {num_full}",
            )
        suffix = self._suffixes.get(group_id) or self._make_suffix(group_id)
        blocks = tuple(block_ids[num_cached:num_full])
        new_hashes = hashes[num_cached:num_full]
        if positions is not None:
            blocks = tuple(block_ids[i] for i in positions)
            new_hashes = [new_hashes[i - num_cached] for i in positions]
        keys = cast("tuple[GroupedHash, ...]", tuple([h + suffix for h in new_hashes]))
        carried, index, more = self._keys, self._index, self._insert
        taken = [block for block in blocks if carried[block] is not None]
        for block in taken:
            if block not in self._covered_tokens:
                raise InvariantError("block cannot take another hash", given=block)
        if NULL_BLOCK in blocks:
            raise InvariantError("block cannot take another hash", given=NULL_BLOCK)
        for block in taken:
            self._forget(block)
        for block, key in zip(blocks, keys, strict=True):
            carried[block] = key
            if key in index:
                more(key, block)
            else:
                index[key] = block
        if self.record_events:
            parent = hashes[num_cached - 1] if num_cached else None
            self._events.append(Stored(blocks, keys, parent, block_tokens, origin, content))

    def cache_inside(
        self,
        block_hash: BlockHash,
        block: BlockId,
        group_id: GroupId,
        *,
        covered_tokens: int,
        block_tokens: int,
    ) -> tuple[GroupedHash, bool]:
        """Make a block findable at the position up to which a hash covers it.

        `covered_tokens` of the block's `block_tokens` tokens are covered. What the block carried
        is forgotten if it covers less, and kept beside otherwise.

        Returns:
            The key, and whether it is new (the caller tells the event, see `tell_stored`).

        """
        key = pack_group(block_hash, group_id)
        if key in self.keys_of(block):
            return key, False
        if self._covered_tokens.get(block, block_tokens) < covered_tokens:
            self._forget(block)
        if self._keys[block] is None:
            self._keys[block] = key
            if covered_tokens < block_tokens:
                self._covered_tokens[block] = covered_tokens
        else:
            self._more_keys.setdefault(block, []).append(key)
        self._insert(key, block)
        return key, True

    def tell_stored(self, event: Stored) -> None:
        """Record the event of a position inside a block."""
        if self.record_events:
            self._events.append(event)

    def move_keys(self, source: BlockId, target: BlockId) -> None:
        """Make a copy findable in place of the block it was copied from; no event tells it.

        Raises:
            InvariantError: the copy carries a key already.

        """
        if self._keys[target] is not None:
            raise InvariantError("block cannot take another hash", given=target)
        for key in self.keys_of(source):
            self._drop(key, source)
            self._insert(key, target)
        self._keys[target], self._keys[source] = self._keys[source], None
        if source in self._more_keys:
            self._more_keys[target] = self._more_keys.pop(source)
        if source in self._covered_tokens:
            self._covered_tokens[target] = self._covered_tokens.pop(source)

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Forget the hashes of blocks, in the given order; their owners keep them.

        Raises:
            BadInputError: an id outside the pool; those before it are forgotten already.

        """
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                raise call_refused(
                    "unknown_block_id",
                    "unknown block id",
                    allowed=f"0 to {self.num_blocks - 1}",
                    block_id=block,
                )
            if self._keys[block] is not None:
                self._forget(block)

    def reset(self) -> bool:
        """Forget every hash, and tell whether that was done: not while a block is in use."""
        if self.num_used_blocks:
            return False
        self._index = {}
        self._keys = [None] * self.num_blocks
        self._more_keys = {}
        self._covered_tokens = {}
        if self.record_events:
            self._events.append(Cleared())
        return True

    def take_events(self) -> list[PoolEvent]:
        """Return what changed in the index since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _make_suffix(self, group_id: GroupId) -> bytes:
        """Return what makes a hash the key of a group, and keep it: it is asked for every time."""
        self._suffixes[group_id] = pack_group(BlockHash(b""), group_id)
        return self._suffixes[group_id]

    def _insert(self, key: GroupedHash, block: BlockId) -> None:
        entry = self._index.get(key)
        if entry is None:
            self._index[key] = block
        elif isinstance(entry, dict):
            entry[block] = None
        else:
            self._index[key] = {entry: None, block: None}

    def _forget(self, block: BlockId) -> None:
        key = self._keys[block]
        if key is None:
            raise InvariantError("block carries no hash", given=block)
        self._drop(key, block)
        self._keys[block] = None
        if self.record_events:
            self._events.append(Removed(block, key))
        if self._more_keys or self._covered_tokens:
            self._covered_tokens.pop(block, None)
            for more in self._more_keys.pop(block, ()):
                self._drop(more, block)
                if self.record_events:
                    self._events.append(Removed(block, more))

    def _drop(self, key: GroupedHash, block: BlockId) -> None:
        entry = self._index[key]
        if isinstance(entry, dict) and len(entry) > 1:
            del entry[block]
        else:
            del self._index[key]
