"""Which block holds which hash here, and whether it still does.

The index of the worker, not of the service: it says what may be read *now*. A reader keeps the
`Resident` it found, copies the block, and asks `still_holds` afterwards (a sequence lock): when
the answer is yes, nobody was allowed to write into the block in between.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockId, GroupedHash


@dataclass(frozen=True, slots=True)
class Resident:
    """A block that holds the content asked for, as long as its generation stays the same."""

    block_id: BlockId
    generation: int


class Residency:
    """Thread-safe. Every change of what a block holds gives it a new generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hash_of_block: dict[BlockId, GroupedHash] = {}
        # The inner dict is an ordered set: the block that came first is found first.
        self._blocks_of_hash: dict[GroupedHash, dict[BlockId, None]] = {}
        self._generation_of_block: dict[BlockId, int] = {}
        self._next_generation = 1

    def mark_written(self, pairs: Iterable[tuple[GroupedHash, BlockId]]) -> None:
        """Say that each block is completely written and holds its hash's content.

        Repeating a pair changes nothing.

        Raises:
            InvariantError: the null block, or a block that still holds another hash (it was written
                into before `mark_reused`).
        """
        with self._lock:
            for key, block_id in pairs:
                held = self._hash_of_block.get(block_id)
                if block_id == NULL_BLOCK or (held is not None and held != key):
                    raise InvariantError(
                        "a block was written while it was null or still held another hash",
                        given=f"block {block_id}, {key.hex()}",
                        allowed=held.hex() if held is not None else "any block but the null block",
                    )
                if held is None:
                    self._hash_of_block[block_id] = key
                    self._blocks_of_hash.setdefault(key, {})[block_id] = None
                    self._renew(block_id)

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
            return Resident(block_id, self._generation_of_block[block_id])

    def still_holds(self, resident: Resident) -> bool:
        """Return whether the block has held the same content ever since it was found."""
        with self._lock:
            return self._generation_of_block.get(resident.block_id) == resident.generation

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
        del self._generation_of_block[block_id]

    def _renew(self, block_id: BlockId) -> None:
        # One counter for all blocks: a block that comes back never meets an old generation.
        self._generation_of_block[block_id] = self._next_generation
        self._next_generation += 1
