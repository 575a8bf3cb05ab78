"""Prefill/decode serving over real ranks, real gRPC and a tiny model, in one process."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import (
    ConfigError,
    InstanceDiedError,
    NeverFitsError,
    PromptTooLongError,
    SchemeMismatchError,
)
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.messages import AcquireLease, Describe, Description, Leased, ReleaseLease
from kvferry.worker.model.reference import TransformersReference
from kvferry.worker.model.sampling import SamplingParams

T = TypeVar("T")


def prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 250) for _ in range(num_tokens))


def ask(name: str, tokens: tuple[int, ...], max_tokens: int = 6, **more: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)
    return EngineRequest(request_id=RequestId(name), prompt_token_ids=tokens, sampling=sampling)


def with_router(
    router: Router, work: Callable[[Router], Coroutine[Any, Any, T]], timeout_s: float = 60.0
) -> T:
    async def run() -> T:
        await router.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await work(router)
        finally:
            await router.close()

    return asyncio.run(run())


def require_equal(service: Any, *served: Served) -> None:
    reference = TransformersReference(str(service.model))
    for one in served:
        comparison = reference.compare(one.request.prompt_token_ids, one.output_token_ids)
        assert comparison.equal, one.request.request_id


def describe(service: Any) -> Description:
    description = service.coordinator.call(Describe())
    assert isinstance(description, Description)
    return description


def wait_until_idle(service: Any) -> Description:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        description = describe(service)
        if all(i.num_requests == 0 for i in description.instances):
            return description
        time.sleep(0.02)
    raise AssertionError("requests were never released")


def test_a_prompt_is_prefilled_on_one_instance_and_decoded_on_another(service: Any) -> None:
    service.add("p0", "prefill")
    service.add("d0", "decode")
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    require_equal(service, served)
    assert (served.prefill_instance, served.decode_instance) == ("p0", "d0")
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 96, 4)
    assert served.prefill_computed_tokens == 96
    assert served.pulled_bytes == 12 * 2 * 2 * 8 * 2 * 8 * 4  # blocks, layers, K and V, ...
    description = wait_until_idle(service)
    assert (description.num_leases, description.num_handoffs) == (0, 0)


def test_a_later_turn_finds_its_prefix_where_it_was_decoded(service: Any) -> None:
    service.add("p0", "prefill")
    service.add("d0", "decode")
    service.add("d1", "decode")

    async def turns(router: Router) -> tuple[Served, Served]:
        first = await router.serve(ask("a", prompt(1, 100), max_tokens=20))
        past = first.request.prompt_token_ids + first.output_token_ids
        return first, await router.serve(ask("b", past + prompt(2, 30)))

    first, second = with_router(service.router(), turns)
    require_equal(service, first, second)
    assert second.decode_instance == first.decode_instance
    # 100 prompt and 19 written output tokens are 14 full blocks.
    assert second.accounting.local_hit_tokens == 112
    assert second.accounting.remote_hit_tokens == 32
    assert second.accounting.computed_tokens == 6


def test_the_same_prompt_elsewhere_is_pulled_from_the_decode_instance(service: Any) -> None:
    service.add("d0", "decode")
    service.add("d1", "decode")

    async def both(router: Router) -> list[Served]:
        tokens = prompt(3, 64)
        return [
            await router.serve(
                ask(place, tokens), route=Route(decode=InstanceId(place), prefill=None)
            )
            for place in ("d0", "d1")
        ]

    first, second = with_router(service.router(), both)
    assert first.output_token_ids == second.output_token_ids
    assert first.accounting.computed_tokens == 64
    assert second.accounting.remote_hit_tokens == 56
    require_equal(service, second)


def require_equal_under_preemption(
    service: Any, shared: tuple[int, ...], *, max_tokens: int
) -> None:
    """Serve six requests at once in pools that are too small for them, and check each."""

    async def all_at_once(router: Router) -> list[Served]:
        requests = [ask(f"r{i}", shared + prompt(10 + i, 5 * i + 1), max_tokens) for i in range(6)]
        return list(await asyncio.gather(*(router.serve(r) for r in requests)))

    served = with_router(service.router(), all_at_once)
    require_equal(service, *served)
    assert sum(s.preemptions for s in served) >= 1
    for one in served:
        parts = one.accounting
        found = parts.local_hit_tokens + parts.remote_hit_tokens
        assert found + parts.computed_tokens == parts.prompt_tokens
    wait_until_idle(service)


def test_many_requests_at_once_stay_equal_under_preemption(service: Any) -> None:
    service.add("p0", "prefill", num_blocks=40)
    service.add("d0", "decode", num_blocks=21, token_budget=24)
    require_equal_under_preemption(service, prompt(4, 80), max_tokens=24)


def test_sampling_with_a_seed_does_not_depend_on_where_or_beside_whom(service: Any) -> None:
    service.add("d0", "decode")
    service.add("d1", "decode")
    tokens = prompt(5, 40)

    async def run(router: Router) -> list[tuple[int, ...]]:
        alone = await router.serve(ask("alone", tokens, 8, temperature=1.0, seed=7))
        beside = await asyncio.gather(
            *(
                router.serve(ask(f"x{i}", tokens, 8, temperature=1.0, seed=seed))
                for i, seed in enumerate((7, 8, 7))
            )
        )
        return [alone.output_token_ids, *(s.output_token_ids for s in beside)]

    first, again, other, third = with_router(service.router(), run)
    assert first == again == third
    assert other != first


def test_a_dead_decode_instance_hands_its_requests_to_the_other(service: Any) -> None:
    service.add("p0", "prefill")
    service.add("d0", "decode")
    service.add("d1", "decode")

    async def die_in_the_middle(router: Router) -> Served:
        served = None
        count = 0
        route = Route(decode=InstanceId("d0"), prefill=InstanceId("p0"))
        async for event in router.stream(ask("a", prompt(6, 70), 30), route=route):
            count += 1
            if count == 5:
                service.engines["d0"].die()
            if isinstance(event, Served):
                served = event
        assert served is not None
        return served

    served = with_router(service.router(), die_in_the_middle)
    assert served.decode_instance == "d1"
    assert len(served.output_token_ids) == 30
    require_equal(service, served)
    assert [i.info.instance_id for i in describe(service).instances] == ["p0", "d1"]


def test_the_last_decode_instances_death_is_an_error_that_names_it(service: Any) -> None:
    service.add("p0", "prefill")
    service.add("d0", "decode")

    async def die(router: Router) -> None:
        async for _ in router.stream(ask("a", prompt(6, 70), 200)):
            service.engines["d0"].die()

    with pytest.raises(InstanceDiedError, match="d0"):
        with_router(service.router(), die)


def test_a_dead_prefill_instance_only_costs_time(service: Any) -> None:
    service.add("p0", "prefill")
    service.add("d0", "decode")
    service.engines["p0"].die()
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(7, 60))))
    assert served.prefill_instance is None
    assert served.accounting.computed_tokens == 60
    require_equal(service, served)


def test_a_request_that_can_never_fit_is_refused_at_once(service: Any) -> None:
    service.add("d0", "decode", num_blocks=10)
    with pytest.raises(NeverFitsError) as refused:
        with_router(service.router(), lambda r: r.serve(ask("a", prompt(8, 100))))
    assert refused.value.given == {"needed_blocks": 15, "have_blocks": 10}


def test_a_prompt_beyond_the_models_limit_is_refused_at_once(service: Any) -> None:
    service.add("d0", "decode", num_blocks=2000)
    with pytest.raises(PromptTooLongError, match="max_model_len=8192"):
        with_router(service.router(), lambda r: r.serve(ask("a", prompt(8, 8191))))


def test_a_rank_with_another_hash_seed_is_refused_showing_both_roots(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.add("d0", "decode")
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    with pytest.raises(SchemeMismatchError) as refused:
        service.add("d1", "decode")
    # Roots of sha256_cbor for "42" and "0", as real vLLM computes them.
    assert refused.value.given["none_hash"].startswith("9fa6eb003f14425e")
    assert refused.value.allowed["none_hash"].startswith("4e1195df020de59e")


def test_a_second_request_of_an_id_in_flight_is_refused_and_the_first_goes_on(service: Any) -> None:
    service.add("d0", "decode")

    async def twice(router: Router) -> Served:
        request = ask("same", prompt(9, 30), 40)
        events: list[int | Served] = []
        async for event in router.stream(request):
            if not events:
                with pytest.raises(ConfigError, match="in flight"):
                    await router.serve(request)
            events.append(event)
        served = events[-1]
        assert isinstance(served, Served)
        return served

    served = with_router(service.router(), twice)
    assert len(served.output_token_ids) == 40


def test_leaving_a_stream_early_aborts_the_request(service: Any) -> None:
    service.add("d0", "decode")

    async def leave(router: Router) -> None:
        stream = router.stream(ask("a", prompt(9, 30), 500))
        async for _ in stream:
            break
        await stream.aclose()

    with_router(service.router(), leave)
    description = wait_until_idle(service)
    assert description.instances[0].num_used_blocks == 0


def test_a_lone_decode_asks_once_for_many_tokens(service: Any) -> None:
    service.add("d0", "decode")
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(9, 30), 200)))
    require_equal(service, served)
    # Two blocks of 8 slots are granted ahead, and the next question comes when one is used up.
    assert service.ports["d0"].num_steps <= 200 // 8 + 3


def test_decoding_goes_on_while_the_coordinator_is_silent(service: Any) -> None:
    service.add("d0", "decode")
    port = service.ports["d0"]

    async def decode(router: Router) -> tuple[int, Served]:
        events: list[int | Served] = []

        async def listen() -> None:
            async for event in router.stream(ask("a", prompt(9, 30), 400)):
                events.append(event)

        listening = asyncio.create_task(listen())
        while len(events) < 20:
            await asyncio.sleep(0.01)
        port.may_answer_steps.clear()
        before = len(events)
        seen = -1
        while seen != len(events):
            seen = len(events)
            await asyncio.sleep(0.5)
        port.may_answer_steps.set()
        await listening
        served = events[-1]
        assert isinstance(served, Served)
        return seen - before, served

    num_without_answer, served = with_router(service.router(), decode)
    # Those of the last question's answer: half of two blocks of 8 slots.
    assert num_without_answer >= 8
    require_equal(service, served)


def test_a_prefill_in_chunks_is_not_held_up_by_a_decode_that_needs_no_answer(service: Any) -> None:
    service.add("d0", "decode", token_budget=16)
    decoded: list[object] = []
    at_first_token: list[int] = []

    async def both(router: Router) -> Served:
        prefill: asyncio.Task[Served] | None = None
        async for event in router.stream(ask("a", prompt(9, 30), 400)):
            decoded.append(event)
            if len(decoded) == 20:
                prefill = asyncio.create_task(router.serve(ask("b", prompt(10, 320), 1)))
                prefill.add_done_callback(lambda _: at_first_token.append(len(decoded)))
        assert prefill is not None
        return await prefill

    require_equal(service, with_router(service.router(), both))
    # 320 tokens in chunks of 15, beside one token of the other request each.
    assert at_first_token[0] - 20 < 2 * 320 / 15


def test_an_abort_is_heard_while_another_request_waits_for_room(service: Any) -> None:
    # 59 usable blocks of 8: the second prompt fits only when the first request is gone.
    service.add("d0", "decode", num_blocks=60)

    async def leave_the_first(router: Router) -> tuple[int, Served]:
        stream = router.stream(ask("a", prompt(9, 30), 300))
        await anext(stream)
        waiting = asyncio.create_task(router.serve(ask("b", prompt(10, 440), 4)))
        for _ in range(20):
            await anext(stream)
        steps_before = service.ports["d0"].num_steps
        await stream.aclose()
        served = await waiting
        return service.ports["d0"].num_steps - steps_before, served

    num_steps, served = with_router(service.router(), leave_the_first)
    require_equal(service, served)
    assert num_steps < 60


def test_who_waits_for_leased_blocks_asks_often_and_goes_on_when_they_come_back(
    service: Any,
) -> None:
    service.add("d0", "decode", num_blocks=13)
    port = service.ports["d0"]

    async def wait_for_a_lease(router: Router) -> tuple[int, Served]:
        first = await router.serve(ask("a", prompt(9, 80), 1))
        scheme, digest = service.infos["d0"].scheme, service.infos["d0"].identity.digest()
        hashes = hash_tokens(scheme, first.request.prompt_token_ids)
        leased = service.coordinator.call(
            AcquireLease(call_id="l", identity_digest=digest, hashes=hashes, ttl_s=60)
        )
        assert isinstance(leased, Leased)
        assert leased.lease_id is not None
        waiting = asyncio.create_task(router.serve(ask("b", prompt(10, 40), 4)))
        await asyncio.sleep(0.2)
        before = port.num_steps
        await asyncio.sleep(1)
        num_asked = port.num_steps - before
        service.coordinator.call(ReleaseLease(call_id="l", lease_id=leased.lease_id))
        return num_asked, await waiting

    num_asked, served = with_router(service.router(), wait_for_a_lease)
    require_equal(service, served)
    assert num_asked >= 10
