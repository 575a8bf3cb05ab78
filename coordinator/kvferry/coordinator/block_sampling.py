"""How long blocks keep their content and how they are used meanwhile, on a sample of them.

A sampled block is followed from the moment it is handed out until it is handed out again or its
content is evicted. Every n-th block handed out is sampled: which ones these are depends on nothing
but the order of events, so that the same commands always give the same figures.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import BlockId
from kvferry.proto.instance_stats import BUCKETS_S, Histogram, Residency

REMEMBERED_USES = 4


@dataclass(slots=True)
class Moment:
    """The time of the command that is executed now, in seconds; shared by all who need it."""

    now_s: float = 0.0


def require_sample_every(sample_every: int) -> None:
    """Refuse what is not a number of blocks.

    Raises:
        ConfigError: not an integer of at least 1.

    """
    if type(sample_every) is not int or sample_every < 1:
        raise ConfigError(
            "every how many blocks one is sampled", given=repr(sample_every), allowed=">= 1"
        )


class _Histogram:
    """Durations in the buckets of `BUCKETS_S`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float) -> None:
        self._counts[bisect_left(BUCKETS_S, duration_s)] += 1
        self._sum_s += duration_s

    def read(self) -> Histogram:
        return Histogram(upper_ends_s=BUCKETS_S, counts=tuple(self._counts), sum_s=self._sum_s)


class _Life:
    """One sampled block since it was handed out."""

    __slots__ = ("last_use_s", "start_s", "uses_s")

    def __init__(self, now_s: float) -> None:
        self.start_s = self.last_use_s = now_s
        self.uses_s: deque[float] = deque(maxlen=REMEMBERED_USES)


class BlockSampler:
    """Follows every `sample_every`-th block that a pool hands out."""

    def __init__(self, sample_every: int, moment: Moment) -> None:
        """Start without any block; the time is read from `moment`."""
        self._sample_every = sample_every
        self._moment = moment
        self._num_until_sample = 0
        self._lives: dict[BlockId, _Life] = {}
        self._lifetime, self._idle, self._reuse_gap = _Histogram(), _Histogram(), _Histogram()

    def handed_out(self, block_ids: Sequence[BlockId]) -> None:
        """Take note of blocks that get new content from now on."""
        self.evicted(block_ids)
        first, every = self._num_until_sample, self._sample_every
        for block in block_ids[first::every]:
            self._lives[block] = _Life(self._moment.now_s)
        self._num_until_sample = (first - len(block_ids)) % every

    def used(self, block_ids: Iterable[BlockId]) -> None:
        """Take note of blocks whose content is used by one more owner."""
        lives = self._lives
        if not lives:
            return
        now_s = self._moment.now_s
        for block in block_ids:
            life = lives.get(block)
            if life is not None:
                life.last_use_s = now_s
                life.uses_s.append(now_s)

    def evicted(self, block_ids: Collection[BlockId]) -> None:
        """Take note of blocks that lose their content; those among them that are sampled count."""
        lives = self._lives
        if not lives:
            return
        now_s = self._moment.now_s
        for block in block_ids:
            life = lives.pop(block, None)
            if life is None:
                continue
            self._lifetime.add(now_s - life.start_s)
            self._idle.add(now_s - life.last_use_s)
            for before_s, after_s in pairwise(life.uses_s):
                self._reuse_gap.add(after_s - before_s)

    def forget(self) -> None:
        """Follow none of the blocks any further, without counting them: the pool was reset."""
        self._lives.clear()

    def read(self) -> Residency:
        """Return the histograms since the start."""
        return Residency(
            lifetime=self._lifetime.read(),
            idle=self._idle.read(),
            reuse_gap=self._reuse_gap.read(),
        )
