"""Loads that fail at one holder and go on at another, over real ranks and gRPC in one process."""

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
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import BlockId, InstanceId
from kvferry.proto.messages import Locate, Located

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
    residency = actor._own.worker.residency
    blocks = sorted(residency._hash_of_block)
    residency.mark_reused([BlockId(block) for block in blocks[first:]])


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
