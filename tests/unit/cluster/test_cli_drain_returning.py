"""`kvferry drain` of an instance that is coming back waits until it can begin."""

import pytest

from kvferry.cluster.cli_drain import POLL_S, until_over
from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import RestoringError
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.messages import Command, Reply

OVER = Drained(
    instance_id=InstanceId("a"),
    incarnation=Incarnation(1),
    is_over=True,
    seconds=1.0,
    num_cached_blocks=0,
    moved=(),
    num_elsewhere=0,
    num_waiting=0,
    num_dropped=0,
    num_requests=0,
)


class Returning:
    """A coordinator that says of the first calls that the instance is coming back."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        self.num_calls -= 1
        if self.num_calls >= 0:
            raise RestoringError("an instance can be drained once it has told all", given="a")
        return OVER


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes in pauses only."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("kvferry.cluster.cli_drain.time.sleep", sleep)
    monkeypatch.setattr("kvferry.cluster.cli_drain.time.monotonic", lambda: clock[0])
    return clock


def command(deadline_s: float) -> Drain:
    return Drain(instance_id=InstanceId("a"), deadline_s=deadline_s)


def test_it_is_begun_when_the_instance_has_told_all_and_the_wait_is_told_once() -> None:
    lines: list[str] = []
    assert until_over(Returning(3), command(60.0), lines.append) == OVER
    assert lines == [
        "waiting: an instance can be drained once it has told all; given: a",
        "0 blocks moved, 0 waiting, 0 requests running",
    ]


def test_at_the_deadline_it_is_refused_as_the_coordinator_does(now: list[float]) -> None:
    with pytest.raises(RestoringError, match="told all"):
        until_over(Returning(10**6), command(2.0), lambda _: None)
    assert now[0] == pytest.approx(2.0, abs=POLL_S + 1e-6)
