"""Engines that do not answer: nothing new goes there while another is left, then they are dead."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.unit.cluster.fake_engines import FakeCoordinator, FakeEngine, link, request, run

from kvferry.cluster.serving import legs as legs_module
from kvferry.cluster.serving.legs import LATE_AFTER_S, Legs
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import DeadlineError, InstanceDiedError, UnavailableError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Command, RemoveInstance, Reply

D0, D1 = InstanceId("d0"), InstanceId("d1")
SCHEME = make_scheme(hash_block_tokens=4)
LATE = DeadlineError("no answer")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the legs see: `clock.now_s`."""
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(legs_module, "time", clock)
    return clock


def new_router(coordinator: FakeCoordinator, **engines: FakeEngine) -> Router:
    return Router(
        coordinator=coordinator,
        engines={InstanceId(name): link(engine) for name, engine in engines.items()},
        identity_digest=bytes(32),
        scheme=SCHEME,
        settings=RouterSettings(),
    )


def test_an_engine_is_dead_after_two_calls_in_a_row_that_it_did_not_answer() -> None:
    async def test() -> None:
        engine, coordinator, deaths = FakeEngine(), FakeCoordinator(), []
        legs = Legs({D0: link(engine)}, coordinator, lambda *death: deaths.append(death))
        legs.start()
        for answer in (engine.fail, lambda _: engine.answer(), engine.fail):
            answer(LATE)
        await engine.is_asked(4)
        assert legs.is_alive(D0)
        engine.finishes = False
        engine.fail(LATE)
        with pytest.raises(InstanceDiedError, match="instance d0 died: no answer"):
            await anext(legs.run(D0, request("r"), float("inf")))
        assert not legs.is_alive(D0)
        assert [(one.instance_id, one.incarnation) for one in coordinator.removed] == [(D0, 1)]
        assert deaths == [(D0, LATE)]
        assert engine.asked == 4
        await legs.close()

    run(test)


def test_an_engine_whose_process_is_gone_is_dead_at_once_and_its_next_life_is_not() -> None:
    async def test() -> None:
        engine, coordinator = FakeEngine(), FakeCoordinator()
        legs = Legs({D0: link(engine)}, coordinator)
        legs.start()
        engine.finishes = False
        engine.fail(InstanceDiedError("the process is gone"))
        with pytest.raises(InstanceDiedError, match="the process is gone"):
            await anext(legs.run(D0, request("r"), float("inf")))
        next_life = FakeEngine()
        legs.join(D0, link(next_life, incarnation=2))
        assert legs.is_alive(D0)
        (output,) = [one async for one in legs.run(D0, request("r"), float("inf"))]
        assert output.token_ids == (7,)
        await legs.close()

    run(test)


def test_a_late_engine_is_a_suspect_until_it_answers(clock: SimpleNamespace) -> None:
    async def test() -> None:
        late, prompt = FakeEngine(), FakeEngine()
        legs = Legs({D0: link(late), D1: link(prompt)}, FakeCoordinator())
        legs.start()
        clock.now_s += LATE_AFTER_S
        assert legs.suspects() == set()
        prompt.answer()
        await prompt.is_asked(2)
        clock.now_s += 0.1
        assert legs.suspects() == {D0}
        late.answer()
        await late.is_asked(2)
        assert legs.suspects() == set()
        await legs.close()

    run(test)


def test_requests_go_elsewhere_while_an_engine_is_late(clock: SimpleNamespace) -> None:
    async def test() -> None:
        late, prompt = FakeEngine(), FakeEngine()
        router = new_router(FakeCoordinator(), d0=late, d1=prompt)
        await router.start()
        await router.serve(request("both"))
        clock.now_s += LATE_AFTER_S + 0.1
        prompt.answer()
        await prompt.is_asked(2)
        await router.serve(request("one"))
        clock.now_s += LATE_AFTER_S + 0.1
        await router.serve(request("none"))
        assert (late.submitted, prompt.submitted) == (["both", "none"], ["one"])
        await router.close()

    run(test)


def test_requests_go_elsewhere_while_the_coordinator_suspects_an_instance() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(avoid=(D0,))
        suspect, other = FakeEngine(), FakeEngine()
        router = new_router(coordinator, d0=suspect, d1=other)
        await router.start()
        await router.serve(request("first"))
        coordinator.avoid = (D0, D1)
        await router.serve(request("second"))
        assert (suspect.submitted, other.submitted) == (["second"], ["first"])
        await router.close()

    run(test)


def test_one_late_submit_is_no_death_but_the_request_and_later_ones_go_elsewhere() -> None:
    async def test() -> None:
        late, other = FakeEngine(), FakeEngine()
        late.refusal = LATE
        router = new_router(FakeCoordinator(), d0=late, d1=other)
        await router.start()
        served = await router.serve(request("first"), route=Route(decode=D0, prefill=None))
        assert served.decode_instance == D1
        assert late.aborted == ["first"]
        late.refusal = None
        await router.serve(request("second"))
        assert (late.submitted, other.submitted) == (["first"], ["first", "second"])
        assert router.is_alive(D0)
        await router.close()

    run(test)


def test_a_late_submit_to_the_only_engine_fails_the_request_naming_it() -> None:
    async def test() -> None:
        late = FakeEngine()
        late.refusal = LATE
        router = new_router(FakeCoordinator(), d0=late)
        await router.start()
        with pytest.raises(UnavailableError, match="instance d0 did not take the request") as told:
            await router.serve(request("r"))
        assert not isinstance(told.value, InstanceDiedError)
        assert router.is_alive(D0)
        late.refusal = None
        assert (await router.serve(request("again"))).decode_instance == D0
        await router.close()

    run(test)


class SilentCoordinator(FakeCoordinator):
    """Never answers when it is told of a death."""

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        reply = await super().call(command, timeout_s=timeout_s)
        if isinstance(command, RemoveInstance):
            await asyncio.Event().wait()
        return reply


def test_who_waits_hears_of_a_death_also_when_whoever_noticed_it_is_cancelled() -> None:
    async def test() -> None:
        engine, coordinator, deaths = FakeEngine(), SilentCoordinator(), []
        engine.finishes = False
        legs = Legs({D0: link(engine)}, coordinator, lambda *death: deaths.append(death))
        legs.start()
        waiting = asyncio.create_task(anext(legs.run(D0, request("r"), float("inf"))))
        await engine.is_asked(1)
        killed = InstanceDiedError("killed")
        engine.fail(killed)
        while not coordinator.removed:
            await asyncio.sleep(0)
        await legs.close()
        with pytest.raises(InstanceDiedError, match="instance d0 died: killed"):
            await waiting
        assert deaths == [(D0, killed)]

    run(test)
