"""Known failures of handing a prompt from a prefill to a decode instance, each as a test.

The number names the case. Coordinator, router, engines, workers and gRPC are real; the model checks
every byte it reads (`token_engines.py`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
from tests.integration.token_engines import (
    TokenService,
    request,
    token_service,
)
from tests.integration.token_model import BLOCK_TOKENS, answer, fill, new_worker, prompt
from tests.integration.token_peer import TokenPeer
from tests.waiting import wait_until

from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.cluster.serving.sequence import Run
from kvferry.proto.errors import PromptTooLongError
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.messages import OpenHandoff
from kvferry.worker import bulk_server

T = TypeVar("T")
FROM_P_TO_D = Route(prefill=InstanceId("p"), decode=InstanceId("d"))


@pytest.fixture
def service() -> Iterator[TokenService]:
    with token_service() as running:
        yield running


def routed(service: TokenService, work: Callable[[Router], Coroutine[Any, Any, T]]) -> T:
    """Let a router serve all instances of a service while `work` runs."""

    async def run() -> T:
        router = service.router()
        await router.start()
        try:
            async with asyncio.timeout(30.0):
                return await work(router)
        finally:
            await router.close()

    return asyncio.run(run())


def open_handoff(service: TokenService, name: str, ttl_s: float = 30.0) -> None:
    service.coordinator.call(
        OpenHandoff(
            call_id=service.call_id(),
            request_id=RequestId(name),
            prefill_instance=InstanceId("p"),
            decode_instance=InstanceId("d"),
            ttl_s=ttl_s,
        )
    )


# -- B36: the prefill side refuses, gives up, or has to begin again -------------------------------


def test_b36_a_prompt_the_prefill_side_refuses_is_an_error_that_names_it(
    service: TokenService,
) -> None:
    service.add("p", "prefill", max_model_len=64)
    service.add("d", max_model_len=128)
    tokens: list[int] = []

    async def serve(router: Router) -> None:
        async for event in router.stream(request("r", prompt(1, 70)), route=FROM_P_TO_D):
            assert isinstance(event, int)
            tokens.append(event)

    with pytest.raises(PromptTooLongError, match=r"instance p: .*max_model_len=64"):
        routed(service, serve)
    assert tokens == []
    service.require_nothing_held()


def test_b36_what_a_prefill_that_was_aborted_left_out_is_computed_and_never_read(
    service: TokenService,
) -> None:
    """Decode takes the blocks that were written whole and computes the rest itself."""
    p = service.add("p", "prefill", token_budget=8)
    service.add("d")

    def abort_at_half(run: Run) -> None:
        if run.start_position == 32:
            p.engine.abort(run.request.request_id)

    p.model.before_run = abort_at_half
    served = routed(service, lambda r: r.serve(request("r", prompt(1, 64)), route=FROM_P_TO_D))
    assert served.output_token_ids == answer(prompt(1, 64))
    assert served.prefill_computed_tokens == 40
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 40, 24)
    service.require_nothing_held()


def test_b36_a_prefill_preempted_in_its_last_step_is_done_again_before_it_is_reported(
    service: TokenService,
) -> None:
    """Ten blocks: five stay leased for the taker of "a", so the last step of "b" has no room."""
    p = service.add("p", "prefill", start=False, num_blocks=11, token_budget=24)
    d = service.add("d")
    prompts = {"a": prompt(1, 21), "b": prompt(2, 29)}
    for name, tokens in prompts.items():
        open_handoff(service, name)
        p.engine.submit(request(name, tokens, prefill_only=True))
    p.engine.start()
    assert p.result("a")[1].reason == "prefilled"
    p.ask_again()
    p.listen(0.0)
    assert p.finished("b") is None
    assert service.counter("preemptions") == 1

    for name, tokens in prompts.items():
        if name == "b":
            ended = p.result("b")[1]
            assert (ended.reason, ended.preemptions) == ("prefilled", 1)
        d.engine.submit(request(name, tokens))
        output, finished = d.result(name)
        assert output == answer(tokens)
        assert finished.accounting.remote_hit_tokens == len(tokens) - 1
    assert service.counter("handoffs_done") == 2
    service.require_nothing_held()


# -- B37: what a lookup promised is gone when it is fetched ---------------------------------------


@pytest.mark.parametrize(("lost", "num_delivered"), [(2, 8), (0, 0)])
def test_b37_what_was_lost_after_the_promise_is_computed_and_not_counted(
    service: TokenService, lost: int, num_delivered: int
) -> None:
    """The lease keeps the coordinator from giving the block away; here its worker lost it."""
    p, d = service.add("p", "prefill"), service.add("d")
    tokens = prompt(1, 13)
    p.engine.submit(request("seed", tokens, prefill_only=True))
    p.result("seed")
    p.worker.forget = lost
    d.engine.submit(request("r", tokens))
    output, finished = d.result("r")
    assert output == answer(tokens)
    parts = finished.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (
        0,
        num_delivered,
        13 - num_delivered,
    )
    assert service.counter("failed_loads") == 1
    d.engine.submit(request("again", tokens))
    assert d.result("again")[1].accounting.local_hit_tokens == 12
    assert d.worker.stats().of("pulled").num_started == 1
    service.require_nothing_held()


# -- B38: one side outlives the other -------------------------------------------------------------


def test_b38a_three_samples_of_one_prompt_have_three_handoffs_and_all_are_released(
    service: TokenService,
) -> None:
    """A sample is a request of its own; the three share the blocks and not the lease."""
    p, d = service.add("p", "prefill"), service.add("d")
    names, tokens = [f"r/{number}" for number in range(3)], prompt(1, 13)
    for name in names:
        open_handoff(service, name)
        p.engine.submit(request(name, tokens, prefill_only=True))
    for name in names:
        assert p.result(name)[1].reason == "prefilled"
    assert service.description().num_leases == 3
    for number, name in enumerate(names, start=1):
        d.engine.submit(request(name, tokens))
        assert d.result(name)[0] == answer(tokens)
        wait_until(lambda done=number: service.counter("handoffs_done") == done)  # type: ignore[misc]
        assert service.description().num_leases == 3 - number
    service.require_nothing_held()


def test_b38a_three_samples_at_once_are_served_and_released(service: TokenService) -> None:
    service.add("p", "prefill")
    service.add("d")
    tokens = prompt(1, 13)

    async def serve(router: Router) -> list[Served]:
        return await asyncio.gather(
            *(router.serve(request(f"r/{i}", tokens, 3), route=FROM_P_TO_D) for i in range(3))
        )

    for served in routed(service, serve):
        assert served.output_token_ids == answer(tokens, 3)
        assert served.accounting.computed_tokens == 1
    service.require_nothing_held()
    assert service.counter("handoffs_done") == 3


def test_b38b_blocks_of_a_decode_side_that_never_comes_are_used_again_after_the_lease(
    service: TokenService,
) -> None:
    p = service.add("p", "prefill", num_blocks=9)
    service.add("d").stop()
    open_handoff(service, "r", ttl_s=1.0)
    p.engine.submit(request("r", prompt(1, 21), prefill_only=True))
    assert p.result("r")[1].reason == "prefilled"
    assert service.num_free("p") == 3
    p.engine.submit(request("next", prompt(2, 32), prefill_only=True))
    p.ask_again()
    assert service.counter("handoffs_expired") == 0
    assert p.result("next")[1].reason == "prefilled"
    assert service.counter("handoffs_expired") == 1
    service.require_nothing_held()
    assert service.num_free("p") == 8


def test_b38c_a_prefill_worker_that_was_killed_is_replaced_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both decode instances go on without it, and then take from the new one alone."""
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    old, again = prompt(1, 13), prompt(2, 13)
    second = new_worker(6, incarnation=2, paths=("bulk",))
    fill(second, again)
    with (
        TokenPeer(old, num_blocks=6, hold_at=1, paths=("bulk",)) as first,
        token_service(paths=("bulk",)) as service,
        ExitStack() as stack,
    ):
        service.register("a", first.read_line(), 6)
        service.holds("a", old)
        takers = [service.add("d0"), service.add("d1")]
        for taker in takers:
            taker.engine.submit(request("r", old))
            assert first.read_line() == "held"
        first.kill()
        for taker in takers:
            output, finished = taker.result("r", within_s=5.0)
            assert output == answer(old)
            # The slower one may find at the other what that has computed meanwhile.
            parts = finished.accounting
            found = (parts.remote_hit_tokens, parts.computed_tokens)
            assert found in {(BLOCK_TOKENS, 9), (2 * BLOCK_TOKENS, 5), (3 * BLOCK_TOKENS, 1)}

        num_served = [taker.worker.stats().of("served").num_started for taker in takers]
        stack.callback(second.stop)
        service.register("a", second.serve(), 6, incarnation=2)
        service.holds("a", again, incarnation=2)
        for taker in takers:
            taker.engine.submit(request("s", again))
            output, finished = taker.result("s")
            assert output == answer(again)
            assert finished.accounting.remote_hit_tokens == 12
        # Among equal holders the first by name is asked, so not the other decode instance.
        served = [taker.worker.stats().of("served").num_started for taker in takers]
        assert served == num_served
        service.require_nothing_held()
