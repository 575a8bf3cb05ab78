"""Instances that die are started again: at once, then after growing pauses, without end."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from tests.unit.cluster.fake_engines import FakeEngine, link, run

from kvferry.cluster.serving import supervisor as supervisor_module
from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.supervisor import (
    LONGEST_PAUSE_S,
    SETTLED_AFTER_S,
    Attempts,
    Supervisor,
)
from kvferry.proto.errors import (
    InstanceDiedError,
    InstanceDrainedError,
    ResourcesError,
    UnavailableError,
)
from kvferry.proto.ids import InstanceId

D0 = InstanceId("d0")
KILLED = InstanceDiedError("killed")
DRAINED = InstanceDrainedError("d0 was drained")


def never(instance_id: InstanceId) -> bool:
    raise AssertionError("nobody was drained")


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


def test_pauses_double_from_one_second_to_thirty() -> None:
    attempts = Attempts()
    assert attempts.died(now_s=0.0) == 0.0
    assert [attempts.failed() for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_who_dies_soon_again_waits_and_who_had_settled_does_not() -> None:
    attempts = Attempts()
    attempts.died(now_s=0.0)
    attempts.failed()
    attempts.succeeded(now_s=10.0)
    assert attempts.died(now_s=10.0 + SETTLED_AFTER_S - 1.0) == 2.0
    attempts.succeeded(now_s=100.0)
    assert attempts.died(now_s=100.0 + SETTLED_AFTER_S) == 0.0
    assert attempts.failed() == 1.0


def test_an_instance_is_started_until_it_serves_and_each_failure_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.001)
    outcomes: list[EngineLink | Exception] = [
        ResourcesError("no room"),
        OSError("no such file"),
        (life := link(FakeEngine(), incarnation=2)),
    ]

    def start_again(instance_id: InstanceId, given_up: threading.Event) -> EngineLink:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def test() -> None:
        joined: asyncio.Queue[tuple[InstanceId, EngineLink]] = asyncio.Queue()
        supervisor = Supervisor(start_again, never, lambda *one: joined.put_nowait(one))
        supervisor.died(D0, KILLED)
        assert await joined.get() == (D0, life)
        await supervisor.close()

    run(test)
    assert [record.getMessage() for record in caplog.records] == [
        "instance d0 is started again: killed",
        "instance d0 could not be started again, next attempt in 0.001 s: no room",
        "instance d0 could not be started again, next attempt in 0.002 s: no such file",
        "instance d0 is back",
    ]


def test_a_start_under_way_is_given_up_when_the_supervisor_closes() -> None:
    starting, ended = threading.Event(), threading.Event()

    def start_again(instance_id: InstanceId, given_up: threading.Event) -> EngineLink:
        starting.set()
        assert given_up.wait(10.0)
        ended.set()
        raise UnavailableError("given up")

    async def test() -> None:
        joined: list[object] = []
        supervisor = Supervisor(start_again, never, lambda *one: joined.append(one))
        supervisor.died(D0, KILLED)
        await asyncio.to_thread(starting.wait, 10.0)
        await supervisor.close()
        assert ended.is_set()
        supervisor.died(D0, KILLED)
        await supervisor.close()
        assert joined == []

    run(test)


def test_closing_does_not_wait_for_a_pause_between_attempts() -> None:
    tried = threading.Event()

    def start_again(instance_id: InstanceId, given_up: threading.Event) -> EngineLink:
        tried.set()
        raise ResourcesError("no room")

    async def test() -> None:
        supervisor = Supervisor(start_again, never, lambda *_: None)
        supervisor.died(D0, KILLED)
        await asyncio.to_thread(tried.wait, 10.0)
        await supervisor.close()

    assert LONGEST_PAUSE_S > 10.0
    run(test)


def test_who_was_drained_gives_its_place_back_and_is_not_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left: list[InstanceId] = []

    def leave(instance_id: InstanceId) -> bool:
        left.append(instance_id)
        return False

    async def test() -> None:
        joined: list[object] = []
        supervisor = Supervisor(lambda *_: link(FakeEngine()), leave, lambda *a: joined.append(a))
        supervisor.died(D0, DRAINED)
        await until(lambda: "is not started again" in caplog.text)
        # Another router has only seen the end of its processes.
        supervisor.died(D0, KILLED)
        await supervisor.close()
        assert joined == []

    run(test)
    assert left == [D0]
    assert [record.getMessage() for record in caplog.records] == [
        "instance d0 is not started again: d0 was drained"
    ]


def test_who_was_drained_as_its_node_goes_starts_elsewhere_and_may_die_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.001)
    lives = [link(FakeEngine(), incarnation=2), link(FakeEngine(), incarnation=3)]
    steps: list[str] = []

    def leave(instance_id: InstanceId) -> bool:
        steps.append("leave")
        return True

    def start_again(instance_id: InstanceId, given_up: threading.Event) -> EngineLink:
        steps.append("start")
        return lives[steps.count("start") - 1]

    async def test() -> None:
        joined: asyncio.Queue[tuple[InstanceId, EngineLink]] = asyncio.Queue()
        supervisor = Supervisor(start_again, leave, lambda *one: joined.put_nowait(one))
        supervisor.died(D0, DRAINED)
        assert await joined.get() == (D0, lives[0])
        supervisor.died(D0, KILLED)
        assert await joined.get() == (D0, lives[1])
        await supervisor.close()

    run(test)
    assert steps == ["leave", "start", "start"]
    assert (
        caplog.records[0].getMessage() == "instance d0 is started again elsewhere: d0 was drained"
    )
