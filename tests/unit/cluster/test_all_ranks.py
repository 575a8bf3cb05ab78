"""What several ranks of an instance pull counts when all of them have ended, and no sooner."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cluster.serving.all_ranks import AllRanks
from kvferry.proto.errors import (
    BadInputError,
    DeadlineError,
    InstanceDiedError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, Incarnation, InstanceId, LeaseId
from kvferry.proto.layout import Layout
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.pull import CANCELLED, PullOutcome

LOAD = GroupLoad(
    group_id=FIRST_GROUP,
    first_block=0,
    block_ids=[BlockId(5), BlockId(6), BlockId(7)],
    hashes=[BlockHash(bytes([number]) * 32) for number in range(3)],
    first_source_block=0,
    source_hashes=[BlockHash(bytes([number]) * 32) for number in range(3)],
)
SOURCE = Source(
    instance_id=InstanceId("producer"),
    incarnation=Incarnation(1),
    layout=Layout(block_tokens=4),
    rank_addresses=("127.0.0.1:1",),
)


def outcome(num_blocks: int, error_type: str | None = None) -> PullOutcome:
    return PullOutcome(
        num_blocks_of_run=(num_blocks,), num_bytes=1, error=error_type, error_type=error_type
    )


def value_of(outcome: PullOutcome | Exception) -> PullOutcome:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class OtherRank:
    """A `RankPort` whose pull ends when the test says so, or when it is cancelled."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.outcome: PullOutcome | Exception = outcome(3)
        self.reused: list[Any] = []

    def begin(self, method: str, *arguments: Any) -> Any:
        if method == "pull":
            return SimpleNamespace(done=self.ended.wait, result=self._result)
        if method == "cancel_pull":
            if not self.ended.is_set():
                self.outcome = outcome(1, CANCELLED)
            self.ended.set()
        else:
            assert method == "reused"
            self.reused.append(arguments[0])
        return SimpleNamespace(done=lambda _: True, result=lambda _: None)

    def _result(self, timeout_s: float) -> PullOutcome:
        if not self.ended.wait(timeout_s):
            raise DeadlineError("still pulling")
        return value_of(self.outcome)


class Pulling:
    """A pull of an instance with rank 0 and two others, under way in a thread."""

    def __init__(self, own: PullOutcome | Exception) -> None:
        self.others = [OtherRank(), OtherRank()]
        self.cancel = threading.Event()
        self.told: list[PullOutcome | Exception] = []
        self.reused: list[Any] = []
        own_rank: Any = SimpleNamespace(
            worker=SimpleNamespace(pull=lambda **_: value_of(own)), reused=self.reused.append
        )
        self.ranks = AllRanks(own_rank, self.others, pass_timeout_s=1.0)
        self.thread = threading.Thread(target=lambda: self.told.append(self._pull()))
        self.thread.start()

    def _pull(self) -> PullOutcome | Exception:
        try:
            return self.ranks.pull(
                source=SOURCE,
                lease_id=LeaseId("lease-1"),
                loads=[LOAD],
                timeout_s=20.0,
                cancel=self.cancel,
            )
        except KvferryError as error:
            return error

    def end(self) -> PullOutcome:
        """Return what the instance was told."""
        self.thread.join(20.0)
        (told,) = self.told
        return value_of(told)


@pytest.fixture
def begin() -> Any:
    """Begins a pull, given how rank 0's part ends; all ranks end with the test."""
    begun: list[Pulling] = []

    def start(own: PullOutcome | Exception) -> Pulling:
        begun.append(Pulling(own))
        return begun[-1]

    yield start
    for pulling in begun:
        for other in pulling.others:
            other.ended.set()
        pulling.thread.join(20.0)


Begin = Callable[[PullOutcome | Exception], Pulling]


def test_b30_a_pull_has_ended_when_every_rank_has_confirmed(begin: Begin) -> None:
    pulling = begin(outcome(3))
    for other in pulling.others:
        # Rank 0 has everything, and whoever waits for it still has its lease.
        pulling.thread.join(0.2)
        assert pulling.told == []
        other.ended.set()
    assert pulling.end() == PullOutcome(num_blocks_of_run=(3,), num_bytes=3)
    assert [pulling.reused, *(other.reused for other in pulling.others)] == [[], [], []]


def test_what_only_some_ranks_got_is_nobodys(begin: Begin) -> None:
    pulling = begin(outcome(3))
    pulling.others[1].outcome = outcome(1, "NotFoundError")
    for other in pulling.others:
        other.ended.set()
    told = pulling.end()
    assert (told.num_blocks_of_run, told.error_type) == ((1,), "NotFoundError")
    assert [pulling.reused, *(other.reused for other in pulling.others)] == [[(6, 7)]] * 3


def test_when_rank_0_fails_the_others_are_stopped_and_its_error_is_told(begin: Begin) -> None:
    told = begin(outcome(2, "TransferError")).end()
    assert (told.num_blocks_of_run, told.error_type) == ((1,), "TransferError")


def test_a_cancel_reaches_ranks_that_still_pull_when_rank_0_has_ended(begin: Begin) -> None:
    pulling = begin(outcome(3))
    pulling.cancel.set()
    told = pulling.end()
    assert (told.num_blocks_of_run, told.error_type) == ((1,), CANCELLED)


@pytest.mark.parametrize("failure", [RuntimeError("odd"), BadInputError("no such block")])
def test_whatever_ends_rank_0s_part_ends_the_others_before_anybody_hears_of_it(
    begin: Begin, failure: Exception
) -> None:
    pulling = begin(failure)
    told = pulling.end()
    assert (told.num_blocks_of_run, told.error_type) == ((0,), type(failure).__name__)
    assert all(other.ended.is_set() for other in pulling.others)
    assert [pulling.reused, *(other.reused for other in pulling.others)] == [[(5, 6, 7)]] * 3


@pytest.mark.parametrize(
    ("failed", "error_type", "left"),
    [
        (outcome(1, "NotFoundError"), "NotFoundError", (6, 7)),
        (BadInputError("no such block"), "BadInputError", (5, 6, 7)),
    ],
)
def test_when_another_rank_fails_the_rest_are_stopped(
    begin: Begin, failed: PullOutcome | Exception, error_type: str, left: tuple[int, ...]
) -> None:
    pulling = begin(outcome(3))
    first, second = pulling.others
    first.outcome = failed
    first.ended.set()
    assert pulling.end().error_type == error_type
    assert second.outcome == outcome(1, CANCELLED)
    assert second.reused == [left]


@pytest.mark.parametrize(
    "silence",
    [UnavailableError("no connection"), InstanceDiedError("killed"), DeadlineError("late")],
)
def test_a_rank_that_cannot_tell_whether_it_still_writes_ends_the_instance(
    begin: Begin, silence: KvferryError
) -> None:
    pulling = begin(outcome(3))
    pulling.others[1].outcome = silence
    for other in pulling.others:
        other.ended.set()
    with pytest.raises(InstanceDiedError, match="nobody knows whether a rank still writes"):
        pulling.end()
    with pytest.raises(InstanceDiedError):
        pulling.ranks.reused((BlockId(5),))
