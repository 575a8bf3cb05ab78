"""The coordinator is restarted while engines serve: they go on, and tell what they have."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.integration.token_engines import (
    TokenInstance,
    TokenService,
    request,
    token_service,
)
from tests.integration.token_model import answer, prompt
from tests.waiting import wait_until

from kvferry.cluster.serving import engine
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Served
from kvferry.cluster.serving.sequence import Run
from kvferry.proto.errors import DeadlineError, InstanceDiedError, KvferryError, UnavailableError
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Command, RemoveInstance, Reply


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle engines notice soon that they have to come back."""
    monkeypatch.setattr(engine, "IDLE_STEP_S", 0.05)


@pytest.fixture
def service() -> Iterator[TokenService]:
    with token_service() as made:
        yield made


class Passes:
    """Counts what the model of an instance computes, and holds it at a request's n-th token."""

    def __init__(self, instance: TokenInstance) -> None:
        self.num_tokens = 0
        self.held = threading.Event()
        self.gate = threading.Event()
        self._at: tuple[str, int] | None = None
        instance.model.before_run = self._count

    def hold_at(self, name: str, position: int) -> None:
        self._at = name, position

    def _count(self, run: Run) -> None:
        self.num_tokens += len(run.token_ids)
        end = run.start_position + len(run.token_ids)
        if self._at == (run.request.request_id, end):
            self.held.set()
            assert self.gate.wait(60.0)


def serve_during(service: TokenService, asked: EngineRequest, do: Callable[[], None]) -> Served:
    """Serve a request while something is done."""

    async def serve() -> Served:
        router = service.router()
        await router.start()
        serving = asyncio.create_task(router.serve(asked))
        try:
            await asyncio.to_thread(do)
            return await serving
        finally:
            await router.close()

    return asyncio.run(serve())


def cached(service: TokenService, name: str) -> int:
    """Blocks that can be found at an instance; 0 if it is no member."""
    found = [i for i in service.description().instances if i.info.instance_id == name]
    return sum(i.num_cached_blocks for i in found if i.state == "live")


def test_running_requests_lose_nothing_and_what_they_leave_is_found(service: TokenService) -> None:
    a, b = service.add("a"), service.add("b")
    passes = Passes(a)
    passes.hold_at("r1", 21)
    a.engine.submit(request("r1", prompt(1, 10), 40))
    a.engine.submit(request("r2", prompt(2, 9), 40))
    assert passes.held.wait(10.0)
    service.restart_coordinator()
    passes.gate.set()
    for name, number, num_tokens in (("r1", 1, 10), ("r2", 2, 9)):
        tokens, finished = a.result(name)
        assert tokens == answer(prompt(number, num_tokens), 40)
        assert (finished.reason, finished.preemptions) == ("length", 0)
    # Each token once: nothing is computed again. The last ones need no slot.
    assert passes.num_tokens == 10 + 39 + 9 + 39
    assert service.counter("returns") == 1
    whole = (*prompt(1, 10), *answer(prompt(1, 10), 40))
    b.engine.submit(request("again", whole))
    wait_until(lambda: service.counter("returns") == 2)
    tokens, finished = b.result("again")
    assert tokens == answer(whole)
    assert finished.accounting.remote_hit_tokens == 48
    service.require_nothing_held()


def test_without_a_coordinator_who_has_slots_goes_on_and_others_wait(service: TokenService) -> None:
    a = service.add("a")
    passes = Passes(a)
    passes.hold_at("r1", 14)
    a.engine.submit(request("r1", prompt(1, 10), 30))
    assert passes.held.wait(10.0)
    service.kill_coordinator()
    computed = passes.num_tokens
    a.engine.submit(request("r2", prompt(2, 10), 3))
    passes.gate.set()
    # Two blocks were granted ahead, of which one at least is left.
    wait_until(lambda: passes.num_tokens >= computed + 4)
    service.restart_coordinator()
    assert a.result("r1")[0] == answer(prompt(1, 10), 30)
    assert a.result("r2")[0] == answer(prompt(2, 10), 3)


def test_a_request_that_ends_while_the_coordinator_is_away_is_told_to_have_ended(
    service: TokenService,
) -> None:
    a = service.add("a")
    passes = Passes(a)
    passes.hold_at("r1", 12)
    a.engine.submit(request("r1", prompt(1, 10), 4))
    assert passes.held.wait(10.0)
    service.kill_coordinator()
    passes.gate.set()
    wait_until(lambda: passes.num_tokens == 13)
    service.restart_coordinator()
    tokens, finished = a.result("r1")
    assert tokens == answer(prompt(1, 10), 4)
    assert finished.accounting.computed_tokens == 10
    service.require_nothing_held()
    assert cached(service, "a") == 3


def test_a_load_in_flight_ends_and_its_request_finds_what_came() -> None:
    with token_service(paths=()) as service:
        a, b = service.add("a"), service.add("b")
        a.engine.submit(request("seed", prompt(1, 17)))
        a.result("seed")
        a.worker.hold_at = 2
        b.engine.submit(request("loads", prompt(1, 17), 3))
        assert a.worker.held.acquire(timeout=10.0)
        service.restart_coordinator()
        a.worker.hold_at = None
        tokens, finished = b.result("loads")
        assert tokens == answer(prompt(1, 17), 3)
        assert finished.preemptions == 0
        # What had come before the load was given up is here.
        assert finished.accounting.local_hit_tokens == 8
        wait_until(lambda: service.counter("returns") == 2)
        service.require_nothing_held()


def test_a_follower_waits_for_its_turn_when_the_handoff_is_gone(service: TokenService) -> None:
    service.add("p", "prefill", token_budget=8)
    d = service.add("d")
    passes = Passes(service.instances[0])
    passes.hold_at("r1", 16)

    def restart() -> None:
        assert passes.held.wait(10.0)
        wait_until(lambda: d.num_steps > 2)
        service.restart_coordinator()
        passes.gate.set()

    served = serve_during(service, request("r1", prompt(1, 33), 5), restart)
    assert served.output_token_ids == answer(prompt(1, 33), 5)
    wait_until(lambda: service.counter("returns") == 2)
    service.require_nothing_held()


@pytest.mark.parametrize("kind", [UnavailableError, DeadlineError])
def test_without_a_coordinator_requests_go_where_the_load_is_least_and_no_prefill_runs(
    service: TokenService, monkeypatch: pytest.MonkeyPatch, kind: type[KvferryError]
) -> None:
    p, _, d1 = service.add("p", "prefill"), service.add("d0"), service.add("d1")

    async def nobody_answers(command: Command, *, timeout_s: float) -> Reply:
        assert timeout_s <= 2.0
        raise kind("nobody answers")

    monkeypatch.setattr(service, "call", nobody_answers)

    async def serve() -> list[Served]:
        router = service.router()
        await router.start()
        asked = [request(f"r{number}", prompt(number, 20), 3) for number in range(2)]
        try:
            return await asyncio.gather(*map(router.serve, asked))
        finally:
            await router.close()

    served = asyncio.run(serve())
    assert [one.output_token_ids for one in served] == [answer(prompt(n, 20), 3) for n in range(2)]
    assert [one.decode_instance for one in served] == ["d0", "d1"]
    assert [one.prefill_instance for one in served] == [None, None]
    assert d1.model.tables.keys() == {"r1"}
    assert not p.model.tables


def test_a_request_that_comes_while_the_coordinator_is_away_is_served_afterwards(
    service: TokenService,
) -> None:
    d = service.add("d")
    service.kill_coordinator()

    def restart() -> None:
        d.ask_again(2)
        service.restart_coordinator()

    served = serve_during(service, request("r1", prompt(1, 20), 3), restart)
    assert served.output_token_ids == answer(prompt(1, 20), 3)


def test_it_may_be_restarted_again_and_again(service: TokenService) -> None:
    instances = [service.add(name, num_blocks=40) for name in "abc"]
    for life in range(5):
        for number in range(6):
            tokens = prompt(number % 4, 20 + life)
            instances[number % 3].engine.submit(request(f"r{life}-{number}", tokens, 30))
        for instance in instances:
            instance.ask_again(2)
        service.restart_coordinator()
        assert service.epoch == life + 2
    for life in range(5):
        for number in range(6):
            tokens, finished = instances[number % 3].result(f"r{life}-{number}")
            assert tokens == answer(prompt(number % 4, 20 + life), 30)
            assert finished.reason == "length"
    wait_until(lambda: service.counter("returns") == 3)
    service.require_nothing_held()
    # They find one another's blocks again.
    instances[0].engine.submit(request("new", prompt(9, 30)))
    instances[0].result("new")
    instances[1].engine.submit(request("again", prompt(9, 30)))
    assert instances[1].result("again")[1].accounting.remote_hit_tokens == 28


def test_an_engine_that_was_given_up_comes_back(service: TokenService) -> None:
    a = service.add("a")
    a.engine.submit(request("r1", prompt(1, 10), 3))
    a.result("r1")
    service.coordinator.call(
        RemoveInstance(
            call_id=service.call_id(),
            instance_id=InstanceId("a"),
            incarnation=a.info.incarnation,
            reason="it did not answer",
        )
    )
    a.engine.submit(request("r2", prompt(1, 10), 5))
    tokens, finished = a.result("r2")
    assert tokens == answer(prompt(1, 10), 5)
    assert finished.accounting.local_hit_tokens == 8
    assert service.counter("returns") == 1


def test_an_engine_whose_name_another_process_has_ends(service: TokenService) -> None:
    a = service.add("a")
    service.restart_coordinator()
    service.register("a", "127.0.0.1:1", 100, "decode", incarnation=2)
    a.engine.submit(request("r1", prompt(1, 10), 3))
    with pytest.raises(InstanceDiedError, match="another incarnation of a is registered"):
        a.result("r1")
