"""Block ids in the order in which they will be reused: a doubly linked list inside two arrays.

Decides nothing about who may be freed. Used by `block_pool` only.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import cast

from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockId

_ABSENT = -1


class FreeQueue:
    """A queue of block ids with removal from the middle in constant time.

    Eight bytes per block and no object per block, so that a pool of tens of millions of blocks
    stays small. The front is reused first.
    """

    def __init__(self, num_blocks: int) -> None:
        """Queue the ids `0 .. num_blocks - 1` in ascending order."""
        # One sentinel with id `num_blocks` closes the ring: its next is the front, its prev the
        # back, so no operation has to ask whether it touches an end.
        self._sentinel = num_blocks
        self._next = array("i", range(1, num_blocks + 1))
        self._next.append(0)
        self._prev = array("i", range(-1, num_blocks))
        self._prev[0] = num_blocks
        self._len = num_blocks

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block_id: BlockId) -> bool:
        return self._next[block_id] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield BlockId(block)
            block = self._next[block]

    def popleft_n(self, count: int) -> list[BlockId]:
        """Take `count` ids from the front, first to be reused first.

        Raises:
            InvariantError: the queue is shorter; nothing is taken then.

        """
        if count > self._len:
            raise InvariantError("more blocks taken than are free", given=count, allowed=self._len)
        following = self._next
        taken: list[int] = []
        block = following[self._sentinel]
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = _ABSENT
            block = after
        following[self._sentinel] = block
        self._prev[block] = self._sentinel
        self._len -= count
        return cast("list[BlockId]", taken)

    def remove(self, block_id: BlockId) -> None:
        """Take one id out, wherever it stands.

        Raises:
            InvariantError: the id is not queued.

        """
        after = self._next[block_id]
        if after == _ABSENT:
            raise InvariantError("block is not in the free queue", given=block_id)
        before = self._prev[block_id]
        self._next[before] = after
        self._prev[after] = before
        self._next[block_id] = _ABSENT
        self._len -= 1

    def append_n(self, block_ids: Sequence[BlockId]) -> None:
        """Queue distinct ids at the back, keeping their order.

        Raises:
            InvariantError: an id is queued already.

        """
        self._link(self._prev[self._sentinel], block_ids)

    def prepend_n(self, block_ids: Sequence[BlockId]) -> None:
        """Queue distinct ids at the front, keeping their order: the first is reused first.

        Raises:
            InvariantError: an id is queued already.

        """
        self._link(self._sentinel, block_ids)

    def _link(self, before: int, block_ids: Sequence[BlockId]) -> None:
        following, previous = self._next, self._prev
        for block in block_ids:
            if following[block] != _ABSENT:
                raise InvariantError("block is in the free queue already", given=block)
        after = following[before]
        for block in block_ids:
            following[before] = block
            previous[block] = before
            before = block
        following[before] = after
        previous[after] = before
        self._len += len(block_ids)
