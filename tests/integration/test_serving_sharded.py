"""Serving by instances of several ranks, of different layouts and memory orders.

Real transfers and gloo, no Ray.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.test_serving import (
    ask,
    prompt,
    require_equal,
    require_equal_under_preemption,
    wait_until_idle,
    with_router,
)

from kvferry.cluster.serving import rank_actor
from kvferry.cluster.serving.rank import OpenOrder, Rank
from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import ConfigError, InstanceDiedError, PortTakenError
from kvferry.proto.ids import InstanceId
from kvferry.proto.layout_text import parse_layout
from kvferry.proto.messages import Describe

HASH_BLOCK_TOKENS = 8


def layout(text: str, block_tokens: int = 4) -> dict[str, Any]:
    return {
        "layout": parse_layout(text, block_tokens=block_tokens),
        "hash_block_tokens": HASH_BLOCK_TOKENS,
    }


def to(place: str) -> Route:
    return Route(decode=InstanceId(place), prefill=None)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("pcp=2", "dcp=2,interleave=4"),
        ("dcp=2", "block_tokens=8"),
        ("block_tokens=8", "dcp=2"),
        ("dcp=2,block_tokens=8", "block_tokens=8"),
        ("block_tokens=8", "dcp=2,pcp=2,interleave=2"),
        ("dcp=3,block_tokens=8", "pcp=2,block_tokens=8"),
        # Memory orders, of one layout and of two.
        ("block_tokens=8,memory=LBHNS", "block_tokens=8,memory=BLSNH"),
        ("dcp=2,memory=BLSNH", "pcp=2,block_tokens=8,memory=LBSHN"),
    ],
)
def test_a_prompt_is_prefilled_and_decoded_by_instances_of_two_layouts(
    service: Any, prefill: str, decode: str
) -> None:
    places = [
        service.add("p0", "prefill", **layout(prefill)).layout,
        service.add("d0", "decode", **layout(decode)).layout,
    ]
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    require_equal(service, served)
    assert (served.prefill_instance, served.decode_instance) == ("p0", "d0")
    # Whole blocks of the one are computed, and of those whole blocks of the other pulled.
    pulled = 99
    for one in places:
        pulled -= pulled % one.virtual_block_tokens
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens) == (0, pulled)
    assert parts.computed_tokens == 100 - pulled
    assert served.pulled_bytes == pulled * 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, ...
    wait_until_idle(service)


def test_many_requests_stay_equal_under_preemption_in_pools_that_are_too_small(
    service: Any,
) -> None:
    service.add("p0", "prefill", num_blocks=24, **layout("pcp=2,block_tokens=8"))
    service.add("d0", "decode", num_blocks=24, **layout("dcp=2,interleave=2"))
    service.add("d1", "decode", num_blocks=14, **layout("dcp=2,block_tokens=8"))
    require_equal_under_preemption(service, prompt(4, 24), max_tokens=40)


def test_a_later_turn_finds_what_every_rank_has_written_while_decoding(service: Any) -> None:
    service.add("d0", "decode", **layout("dcp=2,interleave=2"))
    service.add("d1", "decode", **layout("block_tokens=8"))

    async def turns(router: Router) -> tuple[Served, Served]:
        first = await router.serve(ask("a", prompt(1, 100), max_tokens=20), route=to("d0"))
        past = first.request.prompt_token_ids + first.output_token_ids
        return first, await router.serve(ask("b", past + prompt(2, 30)), route=to("d1"))

    first, second = with_router(service.router(), turns)
    require_equal(service, first, second)
    # 100 prompt and 19 written output tokens are 14 full blocks.
    assert second.accounting.remote_hit_tokens == 112


@pytest.mark.parametrize("broken", [0, 1])
def test_a_pull_that_one_rank_cannot_finish_is_recomputed_on_all(service: Any, broken: int) -> None:
    service.add("p0", "prefill", **layout("pcp=2"))
    service.add("d0", "decode", **layout("dcp=2,interleave=4"))
    ranks = [service.actors[0]._own, service.other_ranks["p0"][0].rank]
    ranks[broken].worker._server.stop()
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    require_equal(service, served)
    parts = served.accounting
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (0, 100)
    own = service.actors[1]._own.worker
    other = service.other_ranks["d0"][0].rank.worker
    wait_until_idle(service)
    # What the ranks hold of the request is what was computed: the same blocks on both.
    assert own.residency._hash_of_block == other.residency._hash_of_block
    assert own.residency.num_blocks() == 13


def test_a_cancelled_pull_ends_on_every_rank(service: Any, monkeypatch: Any) -> None:
    service.add("p0", "prefill", **layout("pcp=2"))
    service.add("d0", "decode", **layout("dcp=2"))
    held = threading.Event()
    for rank in (service.actors[0]._own, service.other_ranks["p0"][0].rank):
        monkeypatch.setattr(rank.worker, "open_fetch", lambda ask: silent(held))

    async def give_up(router: Router) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await router.serve(ask("a", prompt(1, 100)))

    try:
        with_router(service.router(), give_up)
        given_up = time.monotonic()
        wait_until_idle(service)
        # Left alone, a pull would wait 5 s for a message.
        assert time.monotonic() - given_up < 3
        assert service.other_ranks["d0"][0].rank._cancels == {}
    finally:
        held.set()


def silent(held: threading.Event) -> Iterator[Any]:
    held.wait(20)
    yield from ()


def test_a_rank_that_ends_while_nothing_runs_ends_its_instance_naming_it(service: Any) -> None:
    service.add("d0", "decode", **layout("dcp=2"))
    service.other_ranks["d0"][0].rank.stop()
    with pytest.raises(InstanceDiedError, match="rank 1 of the instance is gone"):
        service.actors[0].outputs(0, 5.0)


def test_a_rank_that_hangs_in_a_pass_is_noticed_after_the_rank_timeout(
    service: Any, monkeypatch: Any
) -> None:
    service.add("d0", "decode", rank_timeout_s=1.0, **layout("dcp=2"))
    held = threading.Event()
    rank = service.other_ranks["d0"][0].rank
    monkeypatch.setattr(rank, "forward", lambda batch: held.wait(20))
    started = time.monotonic()
    try:
        with pytest.raises(InstanceDiedError, match="does not answer"):
            with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    finally:
        held.set()
    assert time.monotonic() - started < 5


def test_a_rank_that_cannot_start_says_why(service: Any, monkeypatch: Any) -> None:
    def refuse(self: Rank, order: OpenOrder) -> None:
        if self._settings.rank == 1:
            raise PortTakenError("no port for rank 1")
        opened(self, order)

    opened = Rank.open
    monkeypatch.setattr(Rank, "open", refuse)
    with pytest.raises(PortTakenError, match="no port for rank 1"):
        service.add("d0", "decode", rank_timeout_s=1.0, **layout("dcp=2"))


def test_a_layout_that_cannot_be_computed_is_refused_by_its_rank(service: Any) -> None:
    with pytest.raises(ConfigError, match="instance d0: the reference engine deals tokens"):
        service.add("d0", "decode", **layout("tp=2"))


def test_a_rank_that_is_lost_in_a_pull_ends_the_instance_and_frees_no_block(
    service: Any, monkeypatch: Any
) -> None:
    service.add("p0", "prefill", **layout("pcp=2"))
    service.add("d0", "decode", **layout("dcp=2"))
    (other,) = service.other_ranks["d0"]

    def gone(*_: Any) -> None:
        raise InstanceDiedError("the process of rank 1 is gone")

    monkeypatch.setattr(other.rank, "pull", gone)
    with pytest.raises(InstanceDiedError, match="the process of rank 1 is gone"):
        with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    # The router has removed the instance; nothing was told about the load before.
    assert service.coordinator.call(Describe()).counters["failed_loads"] == 0


def test_a_rank_that_answers_nothing_ends_its_instance_whatever_it_is_doing(
    service: Any, monkeypatch: Any
) -> None:
    service.add("p0", "prefill", **layout("pcp=2"))
    monkeypatch.setattr(rank_actor, "PING_PERIOD_S", 0.1)
    service.add("d0", "decode", rank_timeout_s=1.0, **layout("dcp=2"))
    (other,) = service.other_ranks["d0"]
    held = threading.Event()
    for method in ("pull", "ping"):
        monkeypatch.setattr(other.rank, method, lambda *_: held.wait(20))
    started = time.monotonic()
    try:
        with pytest.raises(InstanceDiedError, match="rank 1 of the instance does not answer"):
            with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    finally:
        held.set()
    assert time.monotonic() - started < 10
