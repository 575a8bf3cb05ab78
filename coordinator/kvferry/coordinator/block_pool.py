"""One instance's blocks: who references them, which are free, and which hash each one carries.

Decides which block is evicted next; knows nothing of requests.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import is_

from kvferry.coordinator.block_hashes import BlockHashes
from kvferry.coordinator.block_sampling import BlockSampler
from kvferry.coordinator.free_queue import FreeQueue, Run
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
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupedHash, GroupId


class BlockPool:
    """Ref counts, free queue and hash index of `num_blocks` blocks.

    Block 0 is the null block: it is never free, never cached and never freed. Two blocks with
    equal content are both kept, because block tables are append-only. A block carries the hash of
    what it holds, in one group, and may carry hashes of positions inside it beside that one.

    Blocks come and go in runs, so nearly everything is done to whole lists: one pass over a list
    costs some 20 ns a block, a call per block several times that.
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
        self.sampler: BlockSampler | None = None
        self._unhashed_first = unhashed_first
        # A block's ref count; a free one that was put to the back of the queue has its run there.
        self._states: list[int | Run] = [0] * num_blocks
        self._free = FreeQueue(1, num_blocks, self._states)
        self._hashes = BlockHashes(num_blocks)
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
        return len(self._hashes)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the index, copies included; one under several keys counts as often."""
        return self._hashes.num_blocks()

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
        state = self._states[block_id]
        return state if isinstance(state, int) else 0

    def key_of(self, block_id: BlockId) -> GroupedHash | None:
        """Return the key a block carries, or None."""
        return next(iter(self.keys_of(block_id)), None)

    def keys_of(self, block_id: BlockId) -> tuple[GroupedHash, ...]:
        """Return every key a block is found under, the one it carries first."""
        return self._hashes.keys_of(block_id)

    def index_items(self) -> Iterator[tuple[GroupedHash, tuple[BlockId, ...]]]:
        """Yield every key with its blocks, oldest copy first."""
        return self._hashes.items()

    def hottest_first(self) -> Iterator[BlockHash]:
        """Yield what is held, as often as it is: what has an owner, then what was used last.

        What is free comes after what is before it in its chain. The pool must not change meanwhile.
        """
        states, carried = self._states, self._hashes.carried
        # Of a million blocks, without a line of Python for each.
        owned = compress(carried, map(is_, map(type, states), repeat(int)))
        yield from filter(None, owned)
        yield from filter(None, map(carried.__getitem__, self._free.newest_first()))

    def parent_of(self, block_id: BlockId) -> BlockHash | None:
        """Return the hash before the one that a block carries, None where it is not known."""
        return self._hashes.parents[block_id]

    def num_free_of(self, block_ids: Sequence[BlockId]) -> int:
        """Count those of the blocks that touching would take out of the free queue."""
        states = self._states
        kinds = [type(states[block]) for block in block_ids]
        return kinds.count(Run)

    def get_cached_block(self, block_hash: BlockHash, group_id: GroupId) -> BlockId | None:
        """Return the oldest block of a hash in a group, or None."""
        return self._hashes.find(block_hash, group_id)

    def get_cached_prefix(self, hashes: Iterable[BlockHash], group_id: GroupId) -> list[BlockId]:
        """Return the blocks of the longest run of `hashes`, from the first, that is cached."""
        return self._hashes.find_prefix(hashes, group_id)

    def get_cached_in_groups(
        self, block_hash: BlockHash, group_ids: Iterable[GroupId]
    ) -> list[BlockId] | None:
        """Return the oldest block of a hash in each group, None if one group has none."""
        found: list[BlockId] = []
        for group_id in group_ids:
            block = self._hashes.find(block_hash, group_id)
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
        taken = self._free.take(count)
        self._forget(taken)
        states = self._states
        for block in taken:
            states[block] = 1
        if self.sampler is not None:
            self.sampler.handed_out(taken)
        return taken

    def touch(self, block_ids: Collection[BlockId]) -> None:
        """Add one reference to each block, taking unreferenced ones out of the free queue.

        Raises:
            InvariantError: an unreferenced block was not put to the back of the queue, so it holds
                nothing that could be found; those before it are touched already.

        """
        if self.sampler is not None:
            self.sampler.used(block_ids)
        states = self._states
        for block in block_ids:
            state = states[block]
            if isinstance(state, Run):
                states[block] = 1
                self._free.remove(state)
            elif state:
                states[block] = state + 1
            elif block != NULL_BLOCK:
                raise InvariantError("block is free and holds nothing", given=block)

    def free_blocks(self, ordered: Iterable[BlockId]) -> None:
        """Take one reference from each block; the first given is to be reused first.

        Callers pass a request's table tail first, so that chains are evicted from their end.
        With `unhashed_first`, blocks without a hash go to the front of the queue: nothing is lost
        by reusing them. Null blocks are passed over.
        A block that has no reference left is refused and counted in `num_refused_frees`; the rest
        of the list is freed all the same.
        """
        states, carried, run = self._states, self._hashes.carried, Run()
        blocks, odd = list(ordered), []
        for block in blocks:
            if states[block] == 1 and carried[block] is not None:
                states[block] = run
            else:
                odd.append(block)
        if odd:
            blocks = self._free_odd(blocks, odd, run)
        self._free.append(run, blocks)

    def _free_odd(self, blocks: list[BlockId], odd: list[BlockId], run: Run) -> list[BlockId]:
        """Free what is shared, unhashed or not to be freed; return what goes to the back."""
        states, first = self._states, []
        for block in odd:
            state = states[block]
            if isinstance(state, Run) or state == 0:
                self.num_refused_frees += block != NULL_BLOCK
            elif state > 1:
                states[block] = state - 1
            elif self._unhashed_first:
                states[block] = 0
                first.append(block)
            else:
                states[block] = run
        self._free.prepend(first)
        return list(dict.fromkeys(block for block in blocks if states[block] is run))

    # --- coming back -------------------------------------------------------------------------

    def are_blank(self, block_ids: Iterable[BlockId]) -> bool:
        """Tell whether blocks have neither an owner nor a hash."""
        return not any(map(self._states.__getitem__, block_ids))

    def restore(
        self,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        group_id: GroupId,
        *,
        block_tokens: int,
        origin: GroupOrigin,
    ) -> None:
        """Make blocks that `are_blank` findable, and put them to the back of the queue.

        They are distinct. The first given is to be reused first.
        """
        blocks, run, states = list(block_ids), Run(), self._states
        self._free.pick(blocks)
        self.cache_full_blocks(
            hashes, blocks, 0, len(blocks), group_id, block_tokens=block_tokens, origin=origin
        )
        for block in blocks:
            states[block] = run
            self._hashes.parents[block] = None  # they are no chain
        self._free.append(run, blocks)

    def claim(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each of distinct blocks, whether they can be found or not."""
        blocks, states = list(block_ids), self._states
        blank = [block for block in blocks if states[block] == 0]
        self.touch([block for block in blocks if states[block] != 0])
        self._free.pick(blank)
        for block in blank:
            states[block] = 1

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
        blocks = list(block_ids[num_cached:num_full])
        new_hashes = hashes[num_cached:num_full]
        parent = hashes[num_cached - 1] if num_cached else None
        parents = [parent, *new_hashes[:-1]]
        if positions is not None:
            blocks = [block_ids[i] for i in positions]
            new_hashes = [new_hashes[i - num_cached] for i in positions]
            parents = [parents[i - num_cached] for i in positions]
        self._tell(self._hashes.hold(new_hashes, blocks, group_id, parents))
        if self.record_events:
            chain = tuple(blocks), tuple(new_hashes), group_id, parent
            self._events.append(Stored(*chain, block_tokens, origin, content))

    def cache_inside(
        self,
        block_hash: BlockHash,
        block: BlockId,
        group_id: GroupId,
        *,
        covered_tokens: int,
        block_tokens: int,
    ) -> bool:
        """Make a block findable at the position up to which a hash covers it.

        `covered_tokens` of the block's `block_tokens` tokens are covered. What the block carried
        is forgotten if it covers less, and kept beside otherwise.

        Returns:
            Whether that is new (the caller tells the event then, see `tell_stored`).

        """
        is_new, removed = self._hashes.hold_inside(
            block_hash, block, group_id, covered_tokens=covered_tokens, block_tokens=block_tokens
        )
        self._tell(removed)
        return is_new

    def tell_stored(self, event: Stored) -> None:
        """Record the event of a position inside a block."""
        if self.record_events:
            self._events.append(event)

    def move_keys(self, source: BlockId, target: BlockId) -> None:
        """Make a copy findable in place of the block it was copied from; no event tells it.

        Raises:
            InvariantError: the copy carries a hash already.

        """
        self._hashes.move(source, target)

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Forget the hashes of blocks, in the given order; their owners keep them.

        Raises:
            BadInputError: an id outside the pool; those before it are forgotten already.

        """
        known: dict[BlockId, None] = {}
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                self._forget(list(known))
                raise call_refused(
                    "unknown_block_id",
                    "unknown block id",
                    allowed=f"0 to {self.num_blocks - 1}",
                    block_id=block,
                )
            known[block] = None
        if self.sampler is not None:
            self.sampler.evicted([b for b in known if self._hashes.carried[b] is not None])
        self._forget(list(known))

    def forget_all(self) -> None:
        """Forget every hash; blocks stay with their owners."""
        self._hashes = BlockHashes(self.num_blocks)
        if self.record_events:
            self._events.append(Cleared())

    def take_events(self) -> list[PoolEvent]:
        """Return what changed in the index since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- inside ------------------------------------------------------------------------------

    def _forget(self, blocks: list[BlockId]) -> None:
        """Make distinct blocks not findable any more, in the given order."""
        self._tell(self._hashes.forget(blocks))

    def _tell(self, removed: list[Removed]) -> None:
        if self.record_events:
            self._events += removed
