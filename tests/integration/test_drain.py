"""An instance is drained: real engines and stores pull what only it holds, and it goes."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

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
from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import InstanceDiedError
from kvferry.proto.ids import BlockId
from kvferry.proto.messages import expect


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle engines hear soon what they are to move."""
    monkeypatch.setattr(engine, "IDLE_STEP_S", 0.05)


@pytest.fixture
def service() -> Iterator[TokenService]:
    with token_service() as made:
        yield made


def drain(service: TokenService, instance: TokenInstance, deadline_s: float = 60.0) -> Drained:
    command = Drain(instance_id=instance.instance_id, deadline_s=deadline_s)
    return expect(service.coordinator.call(command), Drained)


def drain_to_its_end(service: TokenService, instance: TokenInstance) -> Drained:
    wait_until(lambda: drain(service, instance).is_over)
    return drain(service, instance)


def serve(instance: TokenInstance, name: str, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Serve a prompt, which must be answered right; return its local and remote hit tokens."""
    instance.engine.submit(request(name, tokens))
    output, finished = instance.result(name)
    assert output == answer(tokens)
    return finished.accounting.local_hit_tokens, finished.accounting.remote_hit_tokens


def test_what_only_it_held_is_a_local_hit_elsewhere_byte_for_byte(service: TokenService) -> None:
    a, b = service.add("a"), service.add("b")
    first, second = prompt(1, 33), prompt(2, 33)
    for number, tokens in enumerate((first, second)):
        serve(a, f"a{number}", tokens)
    over = drain_to_its_end(service, a)
    assert [(moved.instance_id, moved.num_blocks) for moved in over.moved] == [("b", 16)]
    assert over.num_dropped == 0
    assert [one.info.instance_id for one in service.description().instances] == ["b"]
    assert serve(b, "b0", first) == (32, 0)
    assert serve(b, "b1", second) == (32, 0)
    service.require_nothing_held()


def test_its_running_request_ends_as_ever_and_then_its_engine_says_why_it_ends(
    service: TokenService,
) -> None:
    a, b = service.add("a"), service.add("b")
    tokens = prompt(1, 33)
    a.engine.submit(request("r", tokens, max_tokens=40))
    wait_until(lambda: any(i.num_requests for i in service.description().instances))
    drain(service, a)
    assert a.result("r")[0] == answer(tokens, 40)
    over = drain_to_its_end(service, a)
    # What it left is more than its prompt.
    assert over.num_dropped == 0
    assert over.moved[0].num_blocks == 18

    with pytest.raises(InstanceDiedError, match="DrainedError: a was drained"):
        a.result("another")
    assert serve(b, "b", tokens) == (32, 0)


def test_a_router_sends_nothing_new_to_it(service: TokenService) -> None:
    a, b = service.add("a"), service.add("b")
    tokens = prompt(1, 33)
    serve(a, "a", tokens)
    a.engine.submit(request("busy", prompt(3, 33), max_tokens=60))
    drain(service, a)
    router = service.router()

    async def go() -> str:
        await router.start()
        try:
            return (await router.serve(request("r", tokens))).decode_instance
        finally:
            await router.close()

    assert asyncio.run(go()) == b.instance_id


def test_a_new_engine_has_what_was_hot_before_anybody_asks_it() -> None:
    with token_service(warm_share=0.5) as service:
        a = service.add("a")
        tokens = prompt(1, 33)
        serve(a, "a", tokens)
        b = service.add("b")
        wait_until(lambda: service.counter("warmed_blocks") == 8)
        assert serve(b, "b", tokens) == (32, 0)
        service.require_nothing_held()


def test_a_drain_in_a_restarted_coordinator_begins_anew(service: TokenService) -> None:
    a, b = service.add("a"), service.add("b")
    tokens = prompt(1, 33)
    serve(a, "a", tokens)
    drain(service, a)
    service.restart_coordinator()
    wait_until(lambda: service.counter("returns") == 2)
    over = drain_to_its_end(service, a)
    assert over.num_dropped == 0
    assert serve(b, "b", tokens) == (32, 0)


def test_moves_from_a_source_that_does_not_answer_leave_nothing_behind(
    service: TokenService,
) -> None:
    a, b = service.add("a"), service.add("b")
    tokens = prompt(1, 33)
    serve(a, "a", tokens)
    a.worker.stop()
    over = drain_to_its_end(service, a)
    assert (over.moved, over.num_dropped) == ((), 8)
    assert service.counter("failed_moves") == 3
    assert serve(b, "b", tokens) == (0, 0)
    service.require_nothing_held()


def test_an_engine_that_is_stopped_while_it_takes_an_answer_ends_in_good_order(
    service: TokenService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = service.add("a"), service.add("b")
    tokens = prompt(1, 33)
    serve(a, "a", tokens)
    taking, go_on = threading.Event(), threading.Event()
    reused = b.worker.reused

    def slowly(block_ids: Sequence[BlockId]) -> None:
        taking.set()
        assert go_on.wait(20.0)
        reused(block_ids)

    monkeypatch.setattr(b.worker, "reused", slowly)
    b.engine.submit(request("b", tokens))
    assert taking.wait(20.0)
    b.engine.stop(0.01)
    go_on.set()
    b.engine.stop(20.0)
    # The load that it still began was cancelled, and nothing went wrong.
    b.engine.require_alive()
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []
