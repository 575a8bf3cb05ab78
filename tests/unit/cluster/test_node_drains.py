"""Members on nodes that Ray takes away are drained in time; no Ray here."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.builders import make_identity, make_info

from kvferry.cluster import node_drains
from kvferry.cluster.node_drains import NodeDrains, drains_of
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.drain_messages import Drain
from kvferry.proto.errors import RestoringError
from kvferry.proto.ids import Epoch
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, Describe, Description, RegisterInstance, Reply, expect

MEMBERS = {"a": ("n1",), "b": ("n1", "n2"), "c": ("n3",), "outside": ()}


@pytest.fixture
def service() -> CoordinatorService:
    made = CoordinatorService(scheme=make_info("a").scheme, epoch=Epoch(1))
    for name, nodes in MEMBERS.items():
        num_ranks = max(len(nodes), 1)
        info = make_info(
            name,
            identity=make_identity(num_kv_heads=2),
            layout=Layout(block_tokens=4, tp=num_ranks),
            rank_addresses=("127.0.0.1:1",) * num_ranks,
            rank_pids=(1,) * num_ranks,
            rank_nodes=nodes,
        )
        made.handle(RegisterInstance(call_id=name, info=info), 0.0)
    return made


def described(service: CoordinatorService) -> Description:
    return expect(service.handle(Describe(), 0.0)[0], Description)


@pytest.mark.parametrize(
    ("leaving", "drained"),
    [
        ({}, {}),
        ({"elsewhere": 30.0}, {}),
        ({"n1": 30.0}, {"a": 25.0, "b": 25.0}),
        ({"n2": 30.0, "n1": 60.0}, {"a": 55.0, "b": 25.0}),
        ({"n3": None}, {"c": 60.0}),
        ({"n3": 2.0}, {"c": 1.0}),
        ({"n3": -1.0}, {"c": 1.0}),
    ],
)
def test_who_has_a_rank_on_such_a_node_is_drained_shortly_before_it_goes(
    service: CoordinatorService, leaving: dict[str, float | None], drained: dict[str, float]
) -> None:
    found = {one.instance_id: one.deadline_s for one in drains_of(described(service), leaving)}
    assert found == drained


def test_who_is_being_drained_is_left_alone(service: CoordinatorService) -> None:
    for command in drains_of(described(service), {"n3": 30.0}):
        service.handle(command, 0.0)
    assert list(drains_of(described(service), {"n3": 20.0})) == []


def test_a_suspect_is_told_once_and_again_when_it_has_come_back(
    service: CoordinatorService,
) -> None:
    leaving = {"n3": 30.0}
    (status,) = [one for one in described(service).instances if one.info.instance_id == "c"]
    told = {(status.info.instance_id, status.info.incarnation)}
    suspect = replace(described(service), instances=(replace(status, state="suspect"),))
    assert len(list(drains_of(suspect, leaving))) == 1
    assert list(drains_of(suspect, leaving, told)) == []
    live = replace(suspect, instances=(status,))
    assert len(list(drains_of(live, leaving, told))) == 1


class Calls:
    """Answers for the coordinator and for Ray, the first times with errors."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self.errors: list[Exception] = [RuntimeError("no GCS"), RuntimeError("still none")]
        self.refusals = [RestoringError("it has not told all it holds")]
        self.drained = threading.Event()

    def leaving(self) -> dict[str, float | None]:
        if self.errors:
            raise self.errors.pop()
        return {"n3": 30.0}

    def call(self, command: Command) -> Reply:
        if isinstance(command, Drain):
            assert command.instance_id == "c"
            if self.refusals:
                raise self.refusals.pop()
            self.drained.set()
        return self._service.handle(command, 0.0)[0]


@pytest.fixture
def watched(
    service: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Calls], NodeDrains]:
    monkeypatch.setattr(node_drains, "LOOK_S", 0.01)
    return lambda calls: NodeDrains(calls.call, calls.leaving)


def test_the_watch_goes_on_whatever_ray_and_the_coordinator_say(
    service: CoordinatorService, watched: Callable[[Calls], NodeDrains]
) -> None:
    calls = Calls(service)
    watch = watched(calls)
    watch.start()
    try:
        assert calls.drained.wait(10.0)
    finally:
        watch.stop()
    assert {s.info.instance_id for s in described(service).instances if s.state == "draining"} == {
        "c"
    }
