"""Which tokens two ranks of two layouts have in common, as a few strided boxes.

Both deal positions to their shards periodically, so the runs of tokens that source shard a and
destination shard b share repeat after the least common multiple of the two periods. One period is
looked at, whatever the length of the range.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.proto.layout import Layout

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Repeat what is inside `count` times, each time so many tokens further.

    `step` counts positions of the sequence, `source_step` and `destination_step` local tokens of
    the two ranks.
    """

    count: int
    step: int
    source_step: int
    destination_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRuns:
    """Runs of `run_tokens` consecutive tokens, repeated by up to two loops (the outer one first).

    The first run begins at position `first` of the sequence, at local token `source_first` of the
    source rank and `destination_first` of the destination rank; within a run all three count up
    together. Local token t of a rank lies in block `t // block_tokens` of its block table, at
    `t % block_tokens`.
    """

    first: int
    source_first: int
    destination_first: int
    run_tokens: int
    loops: tuple[Loop, ...] = ()

    @property
    def num_runs(self) -> int:
        """Number of runs, each contiguous on both sides."""
        return math.prod(loop.count for loop in self.loops)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all runs."""
        return self.num_runs * self.run_tokens

    def source_tokens(self) -> Positions:
        """Return the source rank's local tokens, in the order of the runs; int64 [num_tokens]."""
        loops = [(loop.count, loop.source_step) for loop in self.loops]
        return tokens_of_runs(self.source_first, self.run_tokens, loops)

    def destination_tokens(self) -> Positions:
        """Return the destination rank's local tokens, likewise."""
        loops = [(loop.count, loop.destination_step) for loop in self.loops]
        return tokens_of_runs(self.destination_first, self.run_tokens, loops)


def tokens_of_runs(first: int, run_tokens: int, loops: Sequence[tuple[int, int]]) -> Positions:
    """Return the tokens of repeated runs, in their order; int64 [num_tokens].

    Args:
        first: the first token of the first run.
        run_tokens: consecutive tokens of a run.
        loops: (count, step in tokens) of each repetition, the outer one first.
    """
    tokens = np.array([first], dtype=np.int64)
    for count, step in (*loops, (run_tokens, 1)):
        # A single round makes no step, whatever a peer says it is.
        steps = np.arange(count, dtype=np.int64) * (step if count > 1 else 0)
        tokens = np.add.outer(tokens, steps).ravel()
    return tokens


Pair = tuple[int, int]
"""A source token shard and a destination token shard."""


def shared_runs(
    source: Layout, destination: Layout, start: int, end: int
) -> dict[Pair, tuple[TokenRuns, ...]]:
    """Return what each pair of token shards shares of the positions [start, end).

    Every position is in exactly one pair. Pairs that share nothing are left out.
    """
    ours, theirs = _Dealing(source), _Dealing(destination)
    period = math.lcm(ours.period, theirs.period)
    # From the first change of owner on, whole periods look alike and begin and end with a run.
    aligned = min(ours.next_change(start, end), theirs.next_change(start, end))
    num_periods = (end - aligned) // period
    if num_periods < 2:
        return _runs_by_pair(ours, theirs, start, end, ())
    repeated = Loop(
        count=num_periods,
        step=period,
        source_step=period // ours.num_shards,
        destination_step=period // theirs.num_shards,
    )
    found: dict[Pair, tuple[TokenRuns, ...]] = {}
    for piece_start, piece_end, loops in (
        (start, aligned, ()),
        (aligned, aligned + period, (repeated,)),
        (aligned + num_periods * period, end, ()),
    ):
        for pair, runs in _runs_by_pair(ours, theirs, piece_start, piece_end, loops).items():
            found[pair] = found.get(pair, ()) + runs
    return found


class _Dealing:
    """How a layout deals positions to its token shards."""

    def __init__(self, layout: Layout) -> None:
        self.num_shards = layout.token_shards
        # A single shard never changes, so its interleave must not cut any run.
        self.interleave = layout.interleave if self.num_shards > 1 else 1
        self.period = self.interleave * self.num_shards

    def next_change(self, start: int, end: int) -> int:
        """Return the first position of at least `start` where the owner changes, at most `end`."""
        if self.num_shards == 1:
            return end
        return min(end, -(-start // self.interleave) * self.interleave)

    def changes(self, start: int, end: int) -> Positions:
        """Return all positions in [start, end) where the owner changes."""
        first = self.next_change(start, end)
        return np.arange(first, end, self.interleave, dtype=np.int64)

    def owner(self, position: Positions) -> Positions:
        return position // self.interleave % self.num_shards

    def local(self, position: Positions) -> Positions:
        return position // self.period * self.interleave + position % self.interleave


def _runs_by_pair(
    ours: _Dealing, theirs: _Dealing, start: int, end: int, loops: tuple[Loop, ...]
) -> dict[Pair, tuple[TokenRuns, ...]]:
    if start == end:
        return {}
    # np.unique would import numpy.ma, which takes longer than any plan.
    changes = np.concatenate([ours.changes(start, end), theirs.changes(start, end)])
    changes.sort()
    first = np.append(start, changes)
    first = first[np.diff(first, prepend=-1) > 0]
    length = np.diff(first, append=end)
    key = ours.owner(first) * theirs.num_shards + theirs.owner(first)
    order = np.argsort(key, kind="stable")
    runs = np.stack([first, ours.local(first), theirs.local(first), length], axis=1)[order]
    begins = np.flatnonzero(np.diff(key[order], prepend=-1))
    ends = np.append(begins[1:], len(runs))
    return {
        divmod(pair, theirs.num_shards): _boxes(runs[begin:end], loops)
        for pair, begin, end in zip(
            key[order][begins].tolist(), begins.tolist(), ends.tolist(), strict=True
        )
    }


def _boxes(runs: Positions, loops: tuple[Loop, ...]) -> tuple[TokenRuns, ...]:
    """Return the runs (rows: first, source, destination, length), those at even steps joined."""
    steps = np.diff(runs, axis=0)
    even = np.all(steps[1:] == steps[:-1], axis=1).tolist()
    same_length = (steps[:, 3] == 0).tolist()
    rows, gaps = runs.tolist(), steps.tolist()
    boxes = []
    index = 0
    while index < len(rows):
        last = index
        if index + 1 < len(rows) and same_length[index]:
            last = index + 1
            while last + 1 < len(rows) and even[last - 1]:
                last += 1
        first, source_first, destination_first, length = rows[index]
        inner: tuple[Loop, ...] = ()
        if last > index:
            step, source_step, destination_step, _ = gaps[index]
            inner = (
                Loop(
                    count=last - index + 1,
                    step=step,
                    source_step=source_step,
                    destination_step=destination_step,
                ),
            )
        boxes.append(
            TokenRuns(
                first=first,
                source_first=source_first,
                destination_first=destination_first,
                run_tokens=length,
                loops=loops + inner,
            )
        )
        index = last + 1
    return tuple(boxes)
