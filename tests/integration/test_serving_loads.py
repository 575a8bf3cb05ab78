"""Loads that go on at another holder, and loads for many, over real ranks and gRPC."""

import asyncio
import threading
from collections.abc import Iterator
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
from tests.integration.test_serving_sharded import layout

from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Locate, Located
from kvferry.worker.frames import Frame, Header
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import FetchAsk

TOKENS = prompt(1, 100)


def serve_at(*places: str) -> Any:
    """Serve one prompt at each of the places, one after the other."""

    async def serve(router: Router) -> list[Served]:
        served = []
        for place in places:
            route = Route(decode=InstanceId(place), prefill=None)
            served.append(await router.serve(ask(place, TOKENS), route=route))
        return served

    return serve


def held(service: Any, name: str) -> int:
    """Return how many blocks of the prompt the coordinator promises at an instance."""
    info = service.infos[name]
    located = service.coordinator.call(
        Locate(identity_digest=info.identity.digest(), hashes=hash_tokens(info.scheme, TOKENS))
    )
    assert isinstance(located, Located)
    return next(h.num_hashes for h in located.holders if h.source.instance_id == name)


def lose_blocks(service: Any, name: str, first: int) -> None:
    """Let an instance's worker lose all of the prompt but its first blocks, untold."""
    (actor,) = [a for a in service.actors if a._settings.instance_id == name]
    lose_blocks_of(actor._own.worker, first)


def lose_blocks_of(worker: WorkerService, first: int) -> None:
    blocks = sorted(worker.residency._hash_of_block)
    worker.reused(blocks[first:])


def two_holders(service: Any) -> None:
    """h0, which is asked first, and h1 have the prompt; d has nothing."""
    for name in ("h0", "h1", "d"):
        service.add(name, "decode")


@pytest.mark.parametrize("kind", ["service", "hybrid_service"])
def test_what_a_dead_holder_does_not_send_comes_from_another(
    kind: str, request: pytest.FixtureRequest
) -> None:
    service = request.getfixturevalue(kind)
    two_holders(service)
    with_router(service.router(), serve_at("h0", "h1"))
    service.stop_transfers("h0")
    (served,) = with_router(service.router(), serve_at("d"))
    require_equal(service, served)
    parts = served.accounting
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (96, 4)
    description = wait_until_idle(service)
    counters = description.counters
    assert (counters["failed_loads"], counters["repeated_loads"]) == (1, 1)
    assert description.num_leases == 0
    # Nobody says that its blocks are gone.
    assert held(service, "h0") == 12


def test_what_a_holder_has_lost_comes_from_another_and_is_not_promised_again(
    service: Any,
) -> None:
    two_holders(service)
    with_router(service.router(), serve_at("h0", "h1"))
    lose_blocks(service, "h0", first=5)
    (served,) = with_router(service.router(), serve_at("d"))
    require_equal(service, served)
    assert served.accounting.remote_hit_tokens == 96
    # Five blocks came from one, and only the other seven from the other.
    assert served.pulled_bytes == 12 * 2 * 2 * 8 * 2 * 8 * 4
    assert held(service, "h0") == 5
    assert held(service, "h1") == 12
    assert describe(service).counters["repeated_loads"] == 1


def test_b37_a_block_lost_at_one_rank_of_its_holder_comes_from_another(service: Any) -> None:
    service.add("h0", "decode", **layout("dcp=2"))
    service.add("h1", "decode")
    service.add("d", "decode")
    with_router(service.router(), serve_at("h0", "h1"))
    (other,) = service.other_ranks["h0"]
    lose_blocks_of(other.rank.worker, first=4)
    (served,) = with_router(service.router(), serve_at("d"))
    require_equal(service, served)
    assert served.accounting.remote_hit_tokens == 96
    # d takes parts of several blocks at once, so nobody knows which of them was lost.
    assert (held(service, "h0"), held(service, "h1")) == (0, 12)
    assert wait_until_idle(service).num_leases == 0


class Gate:
    """Holds up the fetches from an instance until it is opened, and counts them."""

    def __init__(self, service: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (actor,) = [a for a in service.actors if a._settings.instance_id == name]
        self._serve = actor._own.worker.open_fetch
        self._open = threading.Event()
        self.num_fetches = 0
        monkeypatch.setattr(actor._own.worker, "open_fetch", self._wait_and_serve)

    def open(self) -> None:
        self._open.set()

    def _wait_and_serve(self, ask: FetchAsk) -> Iterator[Header | Frame]:
        self.num_fetches += 1
        assert self._open.wait(10.0)
        yield from self._serve(ask)


async def fetches(gate: Gate, num_fetches: int) -> None:
    """Wait until so many have come."""
    while gate.num_fetches < num_fetches:
        await asyncio.sleep(0.005)


async def have_been_asked(service: Any, name: str, num_requests: int) -> None:
    """Wait until an engine has so many requests and has asked for those that wait in a step."""
    (actor,) = [a for a in service.actors if a._settings.instance_id == name]
    while len(actor._started()._in_flight) < num_requests:
        await asyncio.sleep(0.005)
    num_steps = service.ports[name].num_steps
    while service.ports[name].num_steps < num_steps + 3:
        await asyncio.sleep(0.005)


def test_many_requests_for_one_prefix_cause_one_transfer(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("h0", "d"):
        service.add(name, "decode")
    with_router(service.router(), serve_at("h0"))
    gate = Gate(service, "h0", monkeypatch)

    async def all_at_once(router: Router) -> list[Served]:
        route = Route(decode=InstanceId("d"), prefill=None)
        serving = [
            asyncio.create_task(router.serve(ask(f"r{i}", TOKENS), route=route)) for i in range(4)
        ]
        await have_been_asked(service, "d", len(serving))
        gate.open()
        return list(await asyncio.gather(*serving))

    served = with_router(service.router(), all_at_once)
    require_equal(service, *served)
    assert gate.num_fetches == 1
    parts = [(s.accounting.remote_hit_tokens, s.accounting.local_hit_tokens) for s in served]
    assert sorted(parts) == [(0, 96), (0, 96), (0, 96), (96, 0)]


def test_the_others_go_on_when_the_one_that_loads_for_all_is_aborted(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("h0", "d"):
        service.add(name, "decode")
    with_router(service.router(), serve_at("h0"))
    gate = Gate(service, "h0", monkeypatch)

    async def leave_the_first(router: Router) -> Served:
        route = Route(decode=InstanceId("d"), prefill=None)
        first = asyncio.create_task(router.serve(ask("first", TOKENS), route=route))
        await fetches(gate, 1)
        second = asyncio.create_task(router.serve(ask("second", TOKENS), route=route))
        await have_been_asked(service, "d", 2)
        first.cancel()
        await fetches(gate, 2)
        gate.open()
        return await second

    served = with_router(service.router(), leave_the_first)
    require_equal(service, served)
    assert served.accounting.remote_hit_tokens == 96
    description = wait_until_idle(service)
    assert (description.counters["repeated_loads"], description.num_leases) == (0, 0)
