"""Decoding that follows a prefill chunk by chunk, over real ranks and gRPC in one process."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.test_serving import (
    ask,
    describe,
    prompt,
    require_equal,
    wait_until_idle,
    with_router,
)

from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import PromptTooLongError
from kvferry.proto.ids import InstanceId, RequestId

TOKENS = prompt(1, 200)
"""Three chunks of 64 tokens at the prefill instance; its full blocks are 192 tokens."""

WAIT_S = 30.0


def engine_of(service: Any, name: str) -> Any:
    (actor,) = [a for a in service.actors if a._settings.instance_id == name]
    return actor._engine


def before_passes(service: Any, name: str, do: Callable[[int], None]) -> None:
    """Call `do` with the number of each of an engine's passes (from 1) before it is computed."""
    engine = engine_of(service, name)
    forward, count = engine._forward, iter(range(1, 1000))

    def counted(runs: Any) -> Any:
        do(next(count))
        return forward(runs)

    engine._forward = counted


def after_pulls(service: Any, name: str, do: Callable[[Any], None]) -> None:
    """Call `do` with the outcome of each pull of an engine."""
    mover = engine_of(service, name)._mover
    pull = mover.pull

    def told(**arguments: Any) -> Any:
        outcome = pull(**arguments)
        do(outcome)
        return outcome

    mover.pull = told


def hold_last_chunk(service: Any) -> threading.Event:
    """Let p0 compute its third chunk only when the event is set."""
    go_on = threading.Event()
    before_passes(service, "p0", lambda n: None if n < 3 else _require(go_on.wait(WAIT_S)))
    return go_on


def _require(condition: bool) -> None:
    assert condition


def two_sides(service: Any, **decode: Any) -> None:
    service.add("p0", "prefill")
    service.add("d0", "decode", **decode)


@pytest.mark.parametrize("kind", ["service", "hybrid_service"])
def test_finished_chunks_are_pulled_before_the_last_one_is_computed(
    kind: str, request: pytest.FixtureRequest
) -> None:
    service = request.getfixturevalue(kind)
    two_sides(service)
    go_on = hold_last_chunk(service)
    pulled: list[int] = []

    def note(outcome: Any) -> None:
        pulled.append(max(outcome.num_blocks_of_run))  # with full attention: all of them
        if sum(pulled) >= 16:
            go_on.set()

    after_pulls(service, "d0", note)
    served = with_router(service.router(), lambda r: r.serve(ask("a", TOKENS)))
    require_equal(service, served)
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 192, 8)
    assert served.ahead_tokens == 128
    assert (served.prefill_instance, served.prefill_computed_tokens) == ("p0", 192)
    description = wait_until_idle(service)
    assert (description.num_leases, description.num_handoffs) == (0, 0)
    assert description.counters["handoffs_done"] == 1
    assert description.counters["failed_loads"] == 0


def test_without_overlap_nothing_is_pulled_ahead_and_the_tokens_are_the_same(service: Any) -> None:
    two_sides(service)
    service.add("d1", "decode")

    async def serve(router: Router, decode: str) -> Served:
        route = Route(decode=InstanceId(decode), prefill=InstanceId("p0"))
        return await router.serve(ask(decode, prompt(len(decode), 150)), route=route)

    in_turn = with_router(service.router(overlap=False), lambda r: serve(r, "d0"))
    overlapped = with_router(service.router(), lambda r: serve(r, "d1"))
    assert in_turn.output_token_ids == overlapped.output_token_ids
    assert in_turn.ahead_tokens == 0
    assert in_turn.prefill_s is not None
    assert 0 < in_turn.prefill_s < in_turn.ttft_s


def test_others_decode_while_a_request_follows(service: Any) -> None:
    two_sides(service, max_running=1)
    go_on = hold_last_chunk(service)
    p0, d0 = InstanceId("p0"), InstanceId("d0")

    async def both(router: Router) -> tuple[Served, Served]:
        follows = asyncio.create_task(
            router.serve(ask("a", TOKENS), route=Route(decode=d0, prefill=p0))
        )
        while describe(service).num_handoffs == 0:
            await asyncio.sleep(0.01)
        other = await router.serve(ask("b", prompt(2, 40)), route=Route(decode=d0, prefill=None))
        assert not follows.done()
        go_on.set()
        return await follows, other

    require_equal(service, *with_router(service.router(), both))


def test_a_prefill_that_dies_between_chunks_leaves_the_rest_to_the_decode_side(
    service: Any,
) -> None:
    two_sides(service)
    go_on = hold_last_chunk(service)

    def die(outcome: Any) -> None:
        if not go_on.is_set():
            service.engines["p0"]._dead = True
            go_on.set()

    after_pulls(service, "d0", die)
    served = with_router(service.router(), lambda r: r.serve(ask("a", TOKENS)))
    require_equal(service, served)
    parts = served.accounting
    assert parts.remote_hit_tokens >= 64
    assert parts.remote_hit_tokens + parts.computed_tokens == 200
    assert [i.info.instance_id for i in wait_until_idle(service).instances] == ["d0"]


def test_b36_a_prefill_that_is_aborted_leaves_the_rest_to_the_decode_side(service: Any) -> None:
    two_sides(service)
    go_on = hold_last_chunk(service)

    def abort(outcome: Any) -> None:
        engine_of(service, "p0").abort(RequestId("a"))
        go_on.set()

    after_pulls(service, "d0", abort)
    served = with_router(service.router(), lambda r: r.serve(ask("a", TOKENS)))
    require_equal(service, served)
    assert served.accounting.remote_hit_tokens >= 64
    assert wait_until_idle(service).num_leases == 0


def test_a_handoff_whose_deadline_passes_leaves_the_rest_to_the_decode_side(service: Any) -> None:
    two_sides(service)
    go_on = hold_last_chunk(service)

    async def serve(router: Router) -> Served:
        served = None
        async for event in router.stream(ask("a", TOKENS)):
            go_on.set()
            if isinstance(event, Served):
                served = event
        assert served is not None
        return served

    # Nobody sends anything but steps, which end what is late.
    served = with_router(service.router(handoff_ttl_s=0.5), serve)
    require_equal(service, served)
    assert describe(service).counters["handoffs_expired"] == 1
    wait_until_idle(service)


def test_a_dead_decode_instances_follower_moves_on_with_what_was_prefilled(service: Any) -> None:
    two_sides(service)
    service.add("d1", "decode")
    go_on = hold_last_chunk(service)

    def die(outcome: Any) -> None:
        service.engines["d0"]._dead = True
        go_on.set()

    after_pulls(service, "d0", die)
    route = Route(decode=InstanceId("d0"), prefill=InstanceId("p0"))
    served = with_router(service.router(), lambda r: r.serve(ask("a", TOKENS), route=route))
    require_equal(service, served)
    assert served.decode_instance == "d1"
    parts = served.accounting
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (192, 8)
    assert served.prefill_computed_tokens == 192


def test_b36_a_prefill_that_refuses_ends_the_request_and_nothing_is_computed_for_it(
    service: Any,
) -> None:
    service.add("p0", "prefill", max_model_len=64)
    service.add("d0", "decode", max_model_len=128)
    passes: list[int] = []
    before_passes(service, "d0", passes.append)
    with pytest.raises(PromptTooLongError, match=r"prefill at p0: .*max_model_len=64"):
        with_router(service.router(), lambda r: r.serve(ask("a", prompt(8, 70))))
    description = wait_until_idle(service)
    assert passes == []
    assert [i.num_used_blocks for i in description.instances] == [0, 0]
    assert (description.num_leases, description.num_handoffs) == (0, 0)


def test_leaving_while_the_prefill_runs_frees_everything_on_both_sides(service: Any) -> None:
    two_sides(service)
    go_on = hold_last_chunk(service)
    pulled = threading.Event()
    after_pulls(service, "d0", lambda outcome: pulled.set())

    async def leave(router: Router) -> None:
        serving = asyncio.create_task(router.serve(ask("a", TOKENS)))
        assert await asyncio.to_thread(pulled.wait, WAIT_S)
        serving.cancel()
        await asyncio.wait({serving})
        go_on.set()

    with_router(service.router(), leave)
    description = wait_until_idle(service)
    assert [i.num_used_blocks for i in description.instances] == [0, 0]
    assert (description.num_leases, description.num_handoffs) == (0, 0)


def test_a_prompt_too_short_to_prefill_is_not_waited_for(service: Any) -> None:
    two_sides(service)
    served = with_router(service.router(min_prefill_hashes=0), lambda r: r.serve(ask("a", (1, 2))))
    assert served.prefill_instance == "p0"
    assert served.ttft_s < 5.0
