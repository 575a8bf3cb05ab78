"""Prefill/decode serving of a model with sliding-window and full layers: three cache groups."""

import asyncio
from typing import Any

import pytest
from tests.integration.test_serving import (
    ask,
    describe,
    prompt,
    require_equal,
    require_equal_under_preemption,
    wait_until_idle,
    with_router,
)
from tests.waiting import wait_until

from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import NeverFitsError
from kvferry.proto.ids import InstanceId
from kvferry.proto.layout import Layout

# K and V of a block in the two layers of a group: 8 tokens, 2 heads of size 8, float32.
GROUP_BLOCK_BYTES = 2 * 2 * 8 * 2 * 8 * 4
# A window of 40 tokens reaches into 5 blocks of 8 before the next token.
WINDOW_BLOCKS = 5


def test_requests_go_on_over_a_restart_of_the_coordinator_with_the_windows_they_have(
    hybrid_service: Any,
) -> None:
    hybrid_service.add("d0", "decode")
    hybrid_service.add("d1", "decode")

    async def serve(router: Router) -> list[Served]:
        served: list[Served] = []
        for number in range(2):
            stream = router.stream(ask(f"r{number}", prompt(number, 150), max_tokens=80))
            events = [await anext(stream) for _ in range(40)]
            # Its windows have moved on, and the blocks behind them were given back.
            await asyncio.to_thread(hybrid_service.restart_coordinator)
            events += [event async for event in stream]
            served += [event for event in events if isinstance(event, Served)]
        return served

    for served in with_router(hybrid_service.router(), serve):
        require_equal(hybrid_service, served)
        assert (served.accounting.computed_tokens, served.preemptions) == (150, 0)
    # The one that served nothing hears of the restart with its next empty step.
    wait_until(lambda: len(describe(hybrid_service).instances) == 2)
    description = wait_until_idle(hybrid_service)
    assert description.epoch == 3
    assert [instance.num_used_blocks for instance in description.instances] == [0, 0]


@pytest.mark.parametrize(
    "orders", [("LSBNH", "LSBNH"), ("BLSNH", "LBHNS"), ("LBSHN", "BLSNH")], ids="-".join
)
def test_only_what_each_groups_rule_needs_is_handed_over(
    hybrid_service: Any, orders: tuple[str, str]
) -> None:
    prefill, decode = (Layout(block_tokens=8, memory=order) for order in orders)
    hybrid_service.add("p0", "prefill", layout=prefill)
    hybrid_service.add("d0", "decode", layout=decode)
    # Chunk by chunk, the windows at the ends of chunks would come, too.
    served = with_router(
        hybrid_service.router(overlap=False),
        lambda r: r.serve(ask("a", prompt(1, 100), max_tokens=60)),
    )
    require_equal(hybrid_service, served)
    assert (served.prefill_instance, served.decode_instance) == ("p0", "d0")
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 96, 4)
    assert served.pulled_bytes == (12 + WINDOW_BLOCKS + WINDOW_BLOCKS) * GROUP_BLOCK_BYTES
    description = wait_until_idle(hybrid_service)
    assert (description.num_leases, description.num_handoffs) == (0, 0)
    assert [instance.num_used_blocks for instance in description.instances] == [0, 0]


def test_blocks_outside_the_window_are_given_back_while_a_request_runs(
    hybrid_service: Any,
) -> None:
    hybrid_service.add("d0", "decode")
    used: list[int] = []

    async def watch(router: Router) -> Served:
        served = None
        async for event in router.stream(ask("a", prompt(2, 200), 100)):
            if isinstance(event, Served):
                served = event
            else:
                used.append(describe(hybrid_service).instances[0].num_used_blocks)
        assert served is not None
        return served

    served = with_router(hybrid_service.router(), watch)
    require_equal(hybrid_service, served)
    # 300 tokens are 38 blocks in each of three groups. A window's group holds its 5, the one that
    # is written, and those granted ahead: 2, and 1 that they may reach into.
    assert max(used[20:]) <= 38 + 2 + 2 * (WINDOW_BLOCKS + 1 + 3)


def test_a_pool_that_holds_the_windows_but_not_all_tokens_suffices(hybrid_service: Any) -> None:
    # 400 + 59 tokens: 58 blocks of full attention, and twice a window with a step's 64 tokens.
    smallest = 58 + 2 * 14 + 1
    hybrid_service.add("d0", "decode", num_blocks=smallest)
    served = with_router(
        hybrid_service.router(), lambda r: r.serve(ask("a", prompt(3, 400), max_tokens=60))
    )
    require_equal(hybrid_service, served)
    hybrid_service.add("d1", "decode", num_blocks=smallest - 1)
    with pytest.raises(NeverFitsError) as refused:
        with_router(
            hybrid_service.router(),
            lambda r: r.serve(
                ask("b", prompt(3, 400), max_tokens=60),
                route=Route(decode=InstanceId("d1"), prefill=None),
            ),
        )
    assert refused.value.given == {"needed_blocks": smallest, "have_blocks": smallest - 1}


def test_a_later_turn_hits_the_window_and_the_prefix(hybrid_service: Any) -> None:
    hybrid_service.add("p0", "prefill")
    hybrid_service.add("d0", "decode")

    async def turns(router: Router) -> tuple[Served, Served]:
        first = await router.serve(ask("a", prompt(4, 100), max_tokens=20))
        past = first.request.prompt_token_ids + first.output_token_ids
        return first, await router.serve(ask("b", past + prompt(5, 5)))

    first, second = with_router(hybrid_service.router(), turns)
    require_equal(hybrid_service, first, second)
    # 100 prompt and 19 written output tokens are 14 full blocks.
    assert second.accounting.local_hit_tokens == 112


def test_what_cannot_be_pulled_is_computed_from_the_start(hybrid_service: Any) -> None:
    hybrid_service.add("p0", "prefill")
    hybrid_service.add("d0", "decode")
    hybrid_service.stop_transfers("p0")
    served = with_router(
        hybrid_service.router(overlap=False),
        lambda r: r.serve(ask("a", prompt(6, 100), max_tokens=20)),
    )
    require_equal(hybrid_service, served)
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 0, 100)
    assert served.preemptions == 0
    assert wait_until_idle(hybrid_service).counters["failed_loads"] == 1


def test_many_requests_at_once_stay_equal_under_preemption(hybrid_service: Any) -> None:
    hybrid_service.add("p0", "prefill", num_blocks=100)
    hybrid_service.add("d0", "decode", num_blocks=56, token_budget=24)
    require_equal_under_preemption(hybrid_service, prompt(7, 80), max_tokens=60)


@pytest.mark.parametrize(
    ("blocks", "pulled", "pulled_tokens"),
    [
        # All 96 tokens, and twice the window's 40 in whole blocks of the one who takes them.
        ((8, 16), 96, 96 + 2 * 48),
        ((16, 8), 96, 96 + 2 * 40),
        ((8, 24), 96, 96 + 2 * 48),
        # A window must end with a block of both, and none of these does within 96 tokens.
        ((24, 40), 0, 0),
    ],
)
def test_windows_are_handed_over_between_blocks_of_different_sizes(
    hybrid_service: Any, blocks: tuple[int, int], pulled: int, pulled_tokens: int
) -> None:
    for name, role, size in zip(("p0", "d0"), ("prefill", "decode"), blocks, strict=True):
        hybrid_service.add(name, role, layout=Layout(block_tokens=size), hash_block_tokens=8)
    served = with_router(
        hybrid_service.router(overlap=False),
        lambda r: r.serve(ask("a", prompt(1, 100), max_tokens=60)),
    )
    require_equal(hybrid_service, served)
    assert served.accounting.remote_hit_tokens == pulled
    assert served.pulled_bytes == pulled_tokens * GROUP_BLOCK_BYTES // 8
    wait_until_idle(hybrid_service)
