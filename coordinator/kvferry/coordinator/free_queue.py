"""Block ids in the order in which they will be reused, kept as runs.

Decides nothing about who may be freed. Used by `block_pool` only.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import compress, islice

from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockId

# Runs up to this length are joined, and tidied at each removal.
_SHORT = 16


class Run:
    """Ids that were put to the back together: `ids[start:]`, of which `num_live` still count."""

    __slots__ = ("ids", "num_live", "start")

    def __init__(self) -> None:
        self.ids: list[BlockId] = []
        self.start = 0
        self.num_live = 0


class FreeQueue:
    """A queue of block ids; the front is reused first.

    Three parts follow one another: ids that were put to the front, ids that nobody has used yet,
    and runs of ids that were put to the back. Whole lists are put in and taken out.

    `states[id]` is the id's run where it has one, and whatever the caller likes else: one list
    that both write saves a write per id. An id that is taken out of the middle leaves an entry
    behind that is passed over; a run is tidied when half of its entries are such, so no removal
    takes long.
    """

    def __init__(self, first: int, end: int, states: "list[int | Run]") -> None:
        """Queue the ids `first .. end - 1` in ascending order."""
        self._front: list[BlockId] = []  # the last one is reused first
        self._unused = range(first, end)
        # Which of the unused ids are still queued, by id; None as long as all are.
        self._is_queued: bytearray | None = None
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._states = states
        self._len = end - first

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[BlockId]:
        yield from reversed(self._front)
        yield from self._queued_unused()
        for run in self._runs:
            yield from self._live(run)

    def newest_first(self) -> Iterator[BlockId]:
        """Yield what was put to the back, the last first."""
        for run in reversed(self._runs):
            yield from reversed(self._live(run))

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
            unused = list(islice(self._queued_unused(), count - len(taken)))
            taken += unused
            end = self._unused.stop
            self._unused = range(unused[-1] + 1 if len(taken) == count else end, end)
        while len(taken) < count:
            self._take_from_first_run(taken, count - len(taken))
        return taken

    def pick(self, block_ids: Collection[BlockId]) -> None:
        """Take out distinct ids of the queue that were not put to the back."""
        if self._is_queued is None:
            self._is_queued = bytearray(b"\1") * self._unused.stop
        if self._front:
            picked = set(block_ids).intersection(self._front)
            self._front = [block for block in self._front if block not in picked]
            self._len -= len(picked)
            block_ids = [block for block in block_ids if block not in picked]
        is_queued = self._is_queued
        for block in block_ids:
            is_queued[block] = 0
        self._len -= len(block_ids)

    def remove(self, run: Run) -> None:
        """Take one id out of its run, wherever it stands; its state is another already."""
        self._len -= 1
        run.num_live -= 1
        num_entries = len(run.ids) - run.start
        if not run.num_live:
            del self._runs[run]
        elif num_entries <= _SHORT or num_entries >= 2 * run.num_live:
            self._tidy(run)

    def append(self, run: Run, block_ids: list[BlockId]) -> None:
        """Put distinct ids that are not queued to the back; their state is `run`, a new one."""
        if not block_ids:
            return
        self._len += len(block_ids)
        last = next(reversed(self._runs), None)
        # A run that is joined has no entry left behind, which could be of one of these ids.
        if last is not None and len(last.ids) + len(block_ids) <= _SHORT:
            last.ids += block_ids
            last.num_live += len(block_ids)
            for block in block_ids:
                self._states[block] = last
            return
        run.ids, run.num_live = block_ids, len(block_ids)
        self._runs[run] = None

    def prepend(self, block_ids: Sequence[BlockId]) -> None:
        """Put distinct ids that are not queued to the front: the first is reused first."""
        self._front += reversed(block_ids)
        self._len += len(block_ids)

    def _queued_unused(self) -> Iterator[BlockId]:
        unused = map(BlockId, self._unused)
        if self._is_queued is None:
            return unused
        return compress(unused, memoryview(self._is_queued)[self._unused.start :])

    def _live(self, run: Run) -> list[BlockId]:
        states = self._states
        return [block for block in run.ids[run.start :] if states[block] is run]

    def _tidy(self, run: Run) -> None:
        run.ids, run.start = self._live(run), 0

    def _take_from_first_run(self, taken: list[BlockId], count: int) -> None:
        """Move up to `count` ids of the oldest run to `taken`."""
        run = next(iter(self._runs))
        if run.num_live < len(run.ids) - run.start:
            self._tidy(run)
        end = run.start + count
        taken += run.ids[run.start : end]
        if run.num_live <= count:
            del self._runs[run]
        else:
            run.start = end
            run.num_live -= count
