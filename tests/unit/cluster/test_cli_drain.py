"""`kvferry drain` waits for the end of a drain, whatever its coordinator goes through meanwhile."""

from types import SimpleNamespace

import pytest

from kvferry.cluster import cli_drain
from kvferry.cluster.cli_drain import GRACE_S, POLL_S, until_over
from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import (
    DeadlineError,
    KvferryError,
    NotFoundError,
    RestoringError,
    StaleError,
    UnavailableError,
)
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.messages import Command, Reply

COMMAND = Drain(instance_id=InstanceId("a"), deadline_s=10.0)
UNDER_WAY = "0 blocks moved, 2 waiting, 1 requests running"
RETURNING = RestoringError("an instance can be drained once it has told all", given="a")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the command sees: it goes on while the command sleeps."""
    clock = SimpleNamespace(now_s=100.0)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    clock.monotonic, clock.sleep = lambda: clock.now_s, sleep
    monkeypatch.setattr(cli_drain, "time", clock)
    return clock


def drained(*, is_over: bool) -> Drained:
    return Drained(
        instance_id=COMMAND.instance_id,
        incarnation=Incarnation(7),
        is_over=is_over,
        seconds=1.0,
        num_cached_blocks=2,
        moved=(),
        num_elsewhere=0,
        num_waiting=2,
        num_dropped=0,
        num_requests=1,
    )


class Scripted:
    """A coordinator that gives these answers, and the last of them for ever."""

    def __init__(self, *answers: Drained | KvferryError) -> None:
        self.asked: list[Drain] = []
        self._answers = list(answers)

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        assert isinstance(command, Drain)
        self.asked.append(command)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, KvferryError):
            raise answer
        return answer


def test_a_restarted_coordinator_begins_anew_with_the_time_that_is_left() -> None:
    coordinator = Scripted(
        drained(is_over=False),
        UnavailableError("nobody answers"),
        UnavailableError("nobody answers"),
        NotFoundError("no such instance"),
        drained(is_over=False),
        drained(is_over=True),
    )
    told: list[str] = []
    assert until_over(coordinator, COMMAND, told.append) == drained(is_over=True)
    assert told == [
        UNDER_WAY,
        "asking again: nobody answers",
        "the coordinator does not know a; it may be coming back",
        UNDER_WAY,
    ]
    assert [one.incarnation for one in coordinator.asked] == [None, *[7] * 5]
    left_s = [one.deadline_s for one in coordinator.asked]
    assert left_s == pytest.approx([10.0, *(10.0 - POLL_S * number for number in range(5))])


def test_a_coordinator_that_does_not_know_it_any_more_is_asked_until_long_after_the_deadline(
    clock: SimpleNamespace,
) -> None:
    coordinator = Scripted(drained(is_over=False), NotFoundError("no such instance"))
    with pytest.raises(DeadlineError, match="a does not end; heard last: the coordinator does not"):
        until_over(coordinator, COMMAND, lambda _: None)
    assert clock.now_s == pytest.approx(100.0 + 10.0 + GRACE_S, abs=2 * POLL_S)
    assert coordinator.asked[-1].deadline_s == 1.0


@pytest.mark.parametrize(
    ("before", "refusal"),
    [
        ((), NotFoundError("no such instance")),
        ((), UnavailableError("nobody answers")),
        ((drained(is_over=False),), StaleError("another incarnation of a is registered")),
    ],
)
def test_what_was_refused_ends_it_at_once(
    before: tuple[Drained, ...], refusal: KvferryError
) -> None:
    coordinator = Scripted(*before, refusal)
    with pytest.raises(type(refusal)):
        until_over(coordinator, COMMAND, lambda _: None)
    assert len(coordinator.asked) == len(before) + 1


def test_it_is_begun_when_the_instance_has_told_all_and_the_wait_is_told_once() -> None:
    lines: list[str] = []
    coordinator = Scripted(*[RETURNING] * 3, drained(is_over=True))
    assert until_over(coordinator, COMMAND, lines.append) == drained(is_over=True)
    assert lines == [
        "waiting: an instance can be drained once it has told all; given: a",
        UNDER_WAY,
    ]


def test_who_is_still_coming_back_at_the_deadline_is_refused_as_the_coordinator_does(
    clock: SimpleNamespace,
) -> None:
    with pytest.raises(RestoringError, match="told all"):
        until_over(Scripted(RETURNING), COMMAND, lambda _: None)
    assert clock.now_s == pytest.approx(100.0 + 10.0, abs=POLL_S + 1e-6)
