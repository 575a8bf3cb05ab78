"""Asking a source again that serves no more transfers at once."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.proto.errors import BusyError
from kvferry.worker.fetch_terms import FetchTerms
from kvferry.worker.pull import PartOutcome

_GROWTH = 2.0


def _between_half_and_all(pause_s: float) -> float:
    return random.uniform(pause_s / 2, pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """How long to wait before each of the times that a busy source is asked again.

    Args:
        first_s: seconds, at most, before it is asked again for the first time.
        longest_s: seconds, at most, before any time; until then every pause is twice the last one.
        count: how often it is asked again. After that another holder may be better.
        jitter: makes a pause of one, not longer, so that those refused together come back apart.
    """

    first_s: float = 0.02
    longest_s: float = 1.0
    count: int = 8
    jitter: Callable[[float], float] = _between_half_and_all

    def __iter__(self) -> Iterator[float]:
        """Yield the pauses, in seconds."""
        pause_s = self.first_s
        for _ in range(self.count):
            yield self.jitter(min(pause_s, self.longest_s))
            pause_s *= _GROWTH


PAUSES = Pauses()


def until_not_busy(
    pull: Callable[[], PartOutcome], terms: FetchTerms, pauses: Pauses
) -> PartOutcome:
    """Pull, again and again while the source is busy; return how it ended.

    A pause that would outlast the deadline is not begun, and a cancel ends it.
    """
    left = iter(pauses)
    while True:
        outcome = pull()
        if outcome.error_type != BusyError.__name__:
            return outcome
        pause_s = next(left, None)
        if pause_s is None or time.monotonic() + pause_s >= terms.end_s:
            return outcome
        terms.cancel.wait(pause_s)
