"""Which block holds which hash here, and whether it still does.

The index of the worker, not of the service: it says what may be read *now*. A reader keeps the
`Resident` it found, copies the block, and asks `still_holds` afterwards (a sequence lock): when
the answer is yes, nobody was allowed to write into the block in between.

The generations lie in memory that other processes of this host may map: they ask the same way.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import BusyError, InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockId, GroupedHash
from kvferry.worker.arena import Arena, HostBytes, open_arena

GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Resident:
    """A block that holds the content asked for, as long as its generation stays the same."""

    block_id: BlockId
    generation: int


class Generations:
    """The number of what each block holds: another one with every change, 0 while it holds nothing.

    Args:
        memory: `GENERATION_BYTES` for each block.
    """

    def __init__(self, memory: HostBytes) -> None:
        self._of_block: npt.NDArray[np.uint64] = memory.view(np.uint64)

    def still_holds(self, resident: Resident) -> bool:
        """Return whether the block has held the same content ever since it was found."""
        return int(self._of_block[resident.block_id]) == resident.generation

    def __getitem__(self, block_id: BlockId) -> int:
        return int(self._of_block[block_id])

    def __setitem__(self, block_id: BlockId, generation: int) -> None:
        self._of_block[block_id] = generation


class Residency:
    """Thread-safe. Every change of what a block holds gives it a new generation.

    `arena` is what other processes of this host can map the `generations` by, if they can.
    `num_resets`: so often was the identity reset, as far as is known here; the count only grows,
    whoever dies. What was written before the last one is old, and must not be served beside what
    is new.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._hash_of_block: dict[BlockId, GroupedHash] = {}
        self._being_written: set[BlockId] = set()
        # The inner dict is an ordered set: the block that came first is found first.
        self._blocks_of_hash: dict[GroupedHash, dict[BlockId, None]] = {}
        num_bytes = GENERATION_BYTES * num_blocks
        self.arena: Arena | None = open_arena(num_bytes)
        memory = np.zeros(num_bytes, np.uint8) if self.arena is None else self.arena.bytes()
        self.generations = Generations(memory)
        self._next_generation = 1
        self.num_resets = 0

    def reset(self, num_resets: int) -> None:
        """Drop what all blocks hold, if there was a reset that is not known here yet."""
        with self._lock:
            if num_resets > self.num_resets:
                self.num_resets = num_resets
                for block_id in list(self._hash_of_block):
                    self._drop(block_id)

    def mark_written(
        self, pairs: Iterable[tuple[GroupedHash, BlockId]], num_resets: int | None = None
    ) -> None:
        """Say that each block is completely written and holds its hash's content.

        Repeating a pair changes nothing, and so does what was begun when there had been only
        `num_resets`, and there are more by now.

        Raises:
            InvariantError: the null block or none that there is, or a block that still holds
                another hash (it was written into before `mark_reused`).
        """
        with self._lock:
            if num_resets is not None and num_resets < self.num_resets:
                return
            for key, block_id in pairs:
                held = self._hash_of_block.get(block_id)
                is_block = NULL_BLOCK < block_id < self._num_blocks
                if not is_block or (held is not None and held != key):
                    raise InvariantError(
                        "a block was written while it was null or still held another hash",
                        given=f"block {block_id}, {key.hex()}",
                        allowed=held.hex() if held is not None else f"1 to {self._num_blocks - 1}",
                    )
                if held is None:
                    self._hash_of_block[block_id] = key
                    self._blocks_of_hash.setdefault(key, {})[block_id] = None
                    self._renew(block_id)

    @contextmanager
    def writing(self, block_ids: Sequence[BlockId]) -> Iterator[None]:
        """Hold blocks for one writer, from before its first byte until it is closed.

        They hold nothing from then on. The owner of the blocks may think that an earlier writer is
        closed, because it took too long, while it still writes.

        Raises:
            BusyError: an earlier writer of one of them is not closed; nothing has changed.
        """
        with self._lock:
            open_ones = self._being_written.intersection(block_ids)
            if open_ones:
                raise BusyError("blocks whose last writer is not closed", given=sorted(open_ones))
            self._being_written.update(block_ids)
            for block_id in block_ids:
                self._drop(block_id)
        try:
            yield
        finally:
            with self._lock:
                self._being_written.difference_update(block_ids)

    def mark_reused(self, block_ids: Iterable[BlockId]) -> None:
        """Drop what the blocks hold: they are about to be written into."""
        with self._lock:
            for block_id in block_ids:
                self._drop(block_id)

    def find(self, key: GroupedHash) -> Resident | None:
        """Return a block that holds the hash now, or None."""
        with self._lock:
            blocks = self._blocks_of_hash.get(key)
            if not blocks:
                return None
            block_id = next(iter(blocks))
            return Resident(block_id, self.generations[block_id])

    def still_holds(self, resident: Resident) -> bool:
        """Return whether the block has held the same content ever since it was found."""
        with self._lock:
            return self.generations.still_holds(resident)

    def key_of(self, block_id: BlockId) -> GroupedHash | None:
        """Return what a block holds now, or None."""
        with self._lock:
            return self._hash_of_block.get(block_id)

    def inventory(self) -> tuple[list[BlockId], list[GroupedHash]]:
        """Return the blocks that hold a hash, in the order written, and the hash of each."""
        with self._lock:
            return list(self._hash_of_block), list(self._hash_of_block.values())

    def num_blocks(self) -> int:
        """Return how many blocks hold a hash now."""
        with self._lock:
            return len(self._hash_of_block)

    def _drop(self, block_id: BlockId) -> None:
        key = self._hash_of_block.pop(block_id, None)
        if key is None:
            return
        blocks = self._blocks_of_hash[key]
        del blocks[block_id]
        if not blocks:
            del self._blocks_of_hash[key]
        self.generations[block_id] = 0

    def _renew(self, block_id: BlockId) -> None:
        # One counter for all blocks: a block that comes back never meets an old generation.
        self.generations[block_id] = self._next_generation
        self._next_generation += 1
