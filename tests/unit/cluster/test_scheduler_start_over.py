"""What an engine's queues do when the coordinator knows of nothing any more."""

from collections.abc import Sequence

import pytest
from tests.unit.cluster.test_scheduler import Rig, request

from kvferry.cluster.serving.scheduler import Scheduler
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.ids import Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.messages import RegisterInstance
from kvferry.proto.restore_messages import RestoredRequest, RestoreRequests
from kvferry.proto.step_messages import LoadResult


@pytest.fixture
def rig() -> Rig:
    return Rig()


def lose_step(rig: Rig, name: str) -> None:
    """Ask something that is never answered."""
    rig.schedulers[name].build_step(
        call_id="lost",
        epoch=Epoch(1),
        instance_id=InstanceId(name),
        incarnation=Incarnation(1),
    )


def restart(rig: Rig, name: str) -> Sequence[RestoredRequest]:
    """Let another coordinator take over; return what it was told of running requests."""
    info = rig.service.state.instances[InstanceId(name)].info
    rig.service = CoordinatorService(
        scheme=rig.service.scheme, epoch=Epoch(rig.service.epoch + 1), check_invariants=True
    )
    command = RegisterInstance(call_id=name, info=info, returning=True)
    rig.service.handle(command, 0.0)
    told = rig.schedulers[name].start_over()
    last = RestoreRequests(
        call_id=name,
        epoch=rig.service.epoch,
        instance_id=InstanceId(name),
        incarnation=Incarnation(1),
        registration=name,
        requests=told,
    )
    rig.service.handle(last, 0.0)
    rig.outputs += rig.schedulers[name].take_outputs()
    return told


def names(told: Sequence[RestoredRequest]) -> list[str]:
    return [one.request_id for one in told]


def loading(rig: Rig) -> Scheduler:
    """A decode instance that loads the prompt of "r", which p has."""
    rig.add_instance("p", "prefill").add(request("at-p", range(14), prefill_only=True))
    rig.run_until_idle("p")
    decode = rig.add_instance("d")
    decode.add(request("r", range(14)))
    rig.step("d")
    return decode


def test_running_requests_go_on_where_they_were(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    scheduler.add(request("r", range(10), max_tokens=6))
    rig.step("d")
    rig.compute("d")
    (told,) = restart(rig, "d")
    assert (told.num_tokens, told.num_computed_tokens, len(told.hashes)) == (12, 11, 3)
    rig.run_until_idle("d")
    finished = rig.finished("r")
    assert (finished.accounting.computed_tokens, finished.preemptions) == (10, 0)
    assert sum(len(o.token_ids) for o in rig.outputs) == 6


def test_what_was_in_a_lost_step_is_not_told_again(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    scheduler.add(request("ends", range(10), max_tokens=1))
    scheduler.add(request("stays", range(20, 30), max_tokens=9))
    rig.step("d")
    lose_step(rig, "d")
    rig.compute("d")
    assert names(restart(rig, "d")) == ["stays"]
    assert rig.finished("ends").reason == "length"
    step = scheduler.build_step(
        call_id="next",
        epoch=Epoch(2),
        instance_id=InstanceId("d"),
        incarnation=Incarnation(1),
    )
    assert (step.releases, step.progress, step.load_results) == ((), (), ())
    assert [ask.request_id for ask in step.running] == ["stays"]


def test_who_has_ended_since_the_lost_step_is_told_to_have_ended(rig: Rig) -> None:
    scheduler = rig.add_instance("d")
    scheduler.add(request("r", range(10), max_tokens=2))
    rig.step("d")
    lose_step(rig, "d")
    rig.compute("d")
    assert not [o for o in rig.outputs if o.finished]
    assert names(restart(rig, "d")) == []
    assert rig.finished("r").reason == "length"


def test_who_was_loading_waits_again_and_may_load_again(rig: Rig) -> None:
    decode = loading(rig)
    assert decode.cancel_loads() == (RequestId("r"),)
    decode.load_ended(LoadResult(request_id=RequestId("r"), num_computed_tokens=4), 100)
    assert names(restart(rig, "d")) == []
    step = decode.build_step(
        call_id="next",
        epoch=Epoch(2),
        instance_id=InstanceId("d"),
        incarnation=Incarnation(1),
    )
    (ask,) = step.waiting
    assert (ask.request_id, ask.allow_remote, ask.resumed) == ("r", True, True)
    reply, _ = rig.service.handle(step, 0.0)
    decode.apply(reply)  # type: ignore[arg-type]
    rig.compute("d")
    rig.run_until_idle("d")
    assert rig.finished("r").preemptions == 0


def test_who_was_aborted_while_loading_has_ended(rig: Rig) -> None:
    decode = loading(rig)
    decode.cancel_loads()
    decode.load_ended(LoadResult(request_id=RequestId("r"), num_computed_tokens=4), 100)
    assert decode.abort(RequestId("r")) == RequestId("r")
    assert names(restart(rig, "d")) == []
    assert rig.finished("r").reason == "aborted"
    assert not decode.must_ask()


def test_who_followed_a_prefill_waits_behind_those_who_loaded(rig: Rig) -> None:
    decode = loading(rig)
    decode.add(request("follows", range(40, 50), follows_prefill=True))
    decode.add(request("waits", range(30, 40)))
    decode.cancel_loads()
    decode.load_ended(LoadResult(request_id=RequestId("r"), num_computed_tokens=4), 100)
    restart(rig, "d")
    step = decode.build_step(
        call_id="next",
        epoch=Epoch(2),
        instance_id=InstanceId("d"),
        incarnation=Incarnation(1),
    )
    assert [ask.request_id for ask in step.waiting] == ["r", "follows", "waits"]
    assert step.follows == ()
