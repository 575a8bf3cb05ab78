"""Puts the numbered batches of one publisher in order: finds gaps, fills them, says what is lost.

Pure: messages and the outcome of replays go in, updates come out; when to ask for a replay and how
long to wait is the subscriber's business.

A publisher that has been restarted counts from 0 again. Its batches are told from repeated and
belated ones by their payloads: a message with the number of a batch taken before, but with
another payload, comes from another life. That is why a replay is always asked for from the last
batch taken on, and not from the first one missing.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvferry.proto.errors import BadInputError
from kvferry.proto.kv_events import KvEventBatch
from kvferry.proto.kv_events_codec import decode_batch

# Digests kept of the batches taken last, to know them again.
REMEMBERED_BATCHES = 256
# Batches that may wait behind a gap; with more, the gap is given up.
MAX_EARLY_BATCHES = 10_000


class Received(NamedTuple):
    """The next batch, in order."""

    seq: int
    batch: KvEventBatch


class Lost(NamedTuple):
    """The batches `[start_seq, end_seq)` will never be known."""

    start_seq: int
    end_seq: int


class Restarted(NamedTuple):
    """The publisher has begun a new life: nothing of the earlier one holds any more."""


Update = Received | Lost | Restarted


class EventSequence:
    """What was taken from one publisher, and what waits behind a gap."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._next_seq = 0
        self._newest_live = -1
        self._early: dict[int, bytes] = {}
        self._taken: OrderedDict[int, int] = OrderedDict()

    @property
    def next_seq(self) -> int:
        """The number of the next batch in order."""
        return self._next_seq

    @property
    def has_gap(self) -> bool:
        """Whether later batches wait for a missing one."""
        return bool(self._early)

    @property
    def replay_from(self) -> int:
        """The number from which on a replay is to be asked for: the last batch taken."""
        return max(self._next_seq - 1, 0)

    def live(self, seq: int, payload: bytes) -> list[Update]:
        """Take a live message, in any order."""
        updates: list[Update] = []
        if seq <= self._newest_live and self._is_of_another_life(seq, payload):
            updates.append(self._restart())
        self._newest_live = max(self._newest_live, seq)
        if seq >= self._next_seq:
            self._early.setdefault(seq, payload)
        updates += self._take_early()
        while len(self._early) > MAX_EARLY_BATCHES:
            updates += self.give_up_gap()
        return updates

    def replayed(self, seq: int, payload: bytes) -> list[Update]:
        """Take a replayed message; a replay is in order, so what it leaves out is lost.

        After `Restarted` the rest of this replay is of no use: another has to be asked for.
        """
        if self._taken.get(seq, hash(payload)) != hash(payload):
            return [self._restart()]
        if seq < self._next_seq:
            return []
        self._early.setdefault(seq, payload)
        updates = self._take_early()
        while self._next_seq <= seq:
            updates += self.give_up_gap()
        return updates

    def replay_was_empty(self) -> list[Update]:
        """Take note of a replay that ended without any batch.

        A publisher that had sent something would have repeated at least the last batch.
        """
        return [self._restart()] if self._next_seq > 0 else []

    def give_up_gap(self) -> list[Update]:
        """Go on behind the present gap: nobody can tell what was in it."""
        if not self._early:
            return []
        start_seq, self._next_seq = self._next_seq, min(self._early)
        lost: list[Update] = [Lost(start_seq, self._next_seq)] if start_seq < self._next_seq else []
        return lost + self._take_early()

    def _restart(self) -> Restarted:
        self._begin()
        return Restarted()

    def _is_of_another_life(self, seq: int, payload: bytes) -> bool:
        """Judge a live message whose number is not new.

        One that is in a gap, or in a gap given up not long ago, is belated. One from before all
        that is remembered is taken for a restart, as vLLM's readers take every smaller number.
        """
        if seq in self._taken:
            return self._taken[seq] != hash(payload)
        return seq < next(iter(self._taken), 0)

    def _take_early(self) -> list[Update]:
        updates: list[Update] = []
        while (payload := self._early.pop(self._next_seq, None)) is not None:
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            self._taken[seq] = hash(payload)
            if len(self._taken) > REMEMBERED_BATCHES:
                self._taken.popitem(last=False)
            try:
                updates.append(Received(seq, decode_batch(payload)))
            except BadInputError:
                updates.append(Lost(seq, seq + 1))
        return updates
