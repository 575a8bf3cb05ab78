"""Block ids in the order in which they will be reused, kept as runs.

Decides nothing about who may be freed. Used by `block_pool` only.
"""

from collections.abc import Iterator, Sequence

from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockId

# A queue this short is never worth tidying.
_FEW_ENTRIES = 1024


class FreeQueue:
    """A queue of block ids; the front is reused first.

    Three parts follow one another: ids that were put to the front, ids that nobody has used yet,
    and ids that were put to the back. Whole lists are put in and taken out, so an id costs a few
    nanoseconds and no object of its own. An id that is taken out of the middle leaves its entry
    behind: such entries are counted per id, skipped when their turn comes, and swept out when they
    are more than those that count.
    """

    def __init__(self, first: int, end: int) -> None:
        """Queue the ids `first .. end - 1` in ascending order."""
        self._front: list[BlockId] = []  # the last one is reused first
        self._unused = range(first, end)
        self._back: list[BlockId] = []
        self._back_start = 0
        # Of an id's entries in the back, so many of the oldest do not count.
        self._stale: dict[BlockId, int] = {}
        self._len = end - first

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[BlockId]:
        yield from reversed(self._front)
        yield from map(BlockId, self._unused)
        stale = dict(self._stale)
        for block in self._back[self._back_start :]:
            if not _pass_over(stale, block):
                yield block

    def take(self, count: int) -> list[BlockId]:
        """Take `count` ids from the front, first to be reused first.

        Raises:
            InvariantError: the queue is shorter; nothing is taken then.

        """
        if count > self._len:
            raise InvariantError("more blocks taken than are free", given=count, allowed=self._len)
        self._len -= count
        taken: list[BlockId] = []
        if self._front:
            taken = self._front[: -count - 1 : -1]
            del self._front[len(self._front) - len(taken) :]
        if self._unused and len(taken) < count:
            unused = self._unused[: count - len(taken)]
            taken += map(BlockId, unused)
            self._unused = self._unused[len(unused) :]
        while len(taken) < count:
            taken += self._take_back(count - len(taken))
        return taken

    def remove(self, block_id: BlockId) -> None:
        """Take out one id of those that were put to the back, wherever it stands.

        The caller knows that it is there: its entry is not looked at now.
        """
        self._stale[block_id] = self._stale.get(block_id, 0) + 1
        self._len -= 1
        entries = len(self._back) - self._back_start
        if entries > 2 * self._len + _FEW_ENTRIES:
            self._sweep()

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Put distinct ids that are not queued to the back, keeping their order."""
        self._back += block_ids
        self._len += len(block_ids)

    def prepend(self, block_ids: Sequence[BlockId]) -> None:
        """Put distinct ids that are not queued to the front: the first is reused first."""
        self._front += reversed(block_ids)
        self._len += len(block_ids)

    def _take_back(self, count: int) -> list[BlockId]:
        """Take up to `count` ids from the oldest entries of the back, of which there must be."""
        start, end = self._back_start, self._back_start + count
        taken = self._back[start:end]
        if not self._stale.keys().isdisjoint(taken):
            taken = [block for block in taken if not _pass_over(self._stale, block)]
        self._back_start = end
        if 2 * end > len(self._back):
            # The entries that are left are fewer than those that move out of their way.
            del self._back[:end]
            self._back_start = 0
        return taken

    def _sweep(self) -> None:
        """Leave only the entries that count."""
        self._back = [
            block for block in self._back[self._back_start :] if not _pass_over(self._stale, block)
        ]
        self._back_start = 0


def _pass_over(stale: dict[BlockId, int], block: BlockId) -> bool:
    """Tell whether an id's oldest entry does not count, and forget that entry then."""
    number = stale.get(block)
    if number is None:
        return False
    if number == 1:
        del stale[block]
    else:
        stale[block] = number - 1
    return True
