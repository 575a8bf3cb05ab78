"""Asking a busy source again: how often, after which pauses, and when no more."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto.ids import LeaseId
from kvferry.worker.busy_source import Pauses, until_not_busy
from kvferry.worker.fetch_terms import FetchTerms
from kvferry.worker.pull import PartOutcome

BUSY = PartOutcome(num_in_place=0, num_bytes=0, error="no place", error_type="BusyError")
BROKEN = PartOutcome(num_in_place=1, num_bytes=8, error="cut", error_type="TransferError")
WHOLE = PartOutcome(num_in_place=2, num_bytes=16)


class Source:
    """Answers with these outcomes, the last of them for ever."""

    def __init__(self, *outcomes: PartOutcome) -> None:
        self._outcomes = list(outcomes)
        self.num_asked = 0

    def pull(self) -> PartOutcome:
        self.num_asked += 1
        return self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]


class Waits(threading.Event):
    """A cancel that tells what was waited, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return self.is_set()


def terms(cancel: threading.Event, left_s: float = 60.0) -> FetchTerms:
    return FetchTerms(lease_id=LeaseId("l"), end_s=time.monotonic() + left_s, cancel=cancel)


def whole(pause_s: float) -> float:
    return pause_s


def test_pauses_double_up_to_the_longest_and_are_as_many_as_said() -> None:
    pauses = Pauses(first_s=0.5, longest_s=3.0, count=5, jitter=whole)
    assert list(pauses) == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.floats(0.001, 1.0), st.floats(0.001, 5.0), st.integers(0, 12))
def test_with_jitter_a_pause_is_between_half_of_it_and_all(
    first_s: float, longest_s: float, count: int
) -> None:
    upper = list(Pauses(first_s=first_s, longest_s=longest_s, count=count, jitter=whole))
    jittered = list(Pauses(first_s=first_s, longest_s=longest_s, count=count))
    assert len(jittered) == count
    assert all(
        most / 2 <= pause <= most <= longest_s for pause, most in zip(jittered, upper, strict=True)
    )


def test_a_busy_source_is_asked_until_it_has_a_place() -> None:
    source, cancel = Source(BUSY, BUSY, WHOLE), Waits()
    pauses = Pauses(first_s=1.0, longest_s=8.0, jitter=whole)
    assert until_not_busy(source.pull, terms(cancel), pauses) == WHOLE
    assert cancel.waited == [1.0, 2.0]


@pytest.mark.parametrize("outcome", [WHOLE, BROKEN])
def test_any_other_end_is_taken_at_once(outcome: PartOutcome) -> None:
    source, cancel = Source(outcome), Waits()
    assert until_not_busy(source.pull, terms(cancel), Pauses()) == outcome
    assert (source.num_asked, cancel.waited) == (1, [])


def test_a_source_that_stays_busy_is_given_up_after_the_last_pause() -> None:
    source, cancel = Source(BUSY), Waits()
    assert until_not_busy(source.pull, terms(cancel), Pauses(count=3)) == BUSY
    assert (source.num_asked, len(cancel.waited)) == (4, 3)


def test_no_pause_is_begun_that_would_outlast_the_deadline() -> None:
    source, cancel = Source(BUSY), Waits()
    pauses = Pauses(first_s=4.0, longest_s=100.0, jitter=whole)
    assert until_not_busy(source.pull, terms(cancel, left_s=10.0), pauses) == BUSY
    # The waits of this test take no time: 4 and 8 seconds are less than the 10 that are left.
    assert (cancel.waited, source.num_asked) == ([4.0, 8.0], 3)
