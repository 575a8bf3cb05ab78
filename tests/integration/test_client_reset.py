"""A reset by the public client: against a real coordinator, control front and store."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.builders import make_identity
from tests.integration.client_service import ClientService, running_client_service

from kvferry.cluster import client_cache
from kvferry.cluster.client import Ferry, ModelCache, connect
from kvferry.proto.errors import UnavailableError
from kvferry.worker.layout_pull import pull_loads
from kvferry.worker.pull import PullOutcome

IDENTITY = make_identity(num_layers=2)
TOKENS = list(range(12))


@pytest.fixture
def service() -> Iterator[ClientService]:
    with running_client_service(IDENTITY, num_blocks=11) as running:
        yield running


@pytest.fixture
def ferry(service: ClientService) -> Iterator[Ferry]:
    with connect(service.address, timeout_s=5.0) as connected:
        yield connected


@pytest.fixture
def cache(ferry: Ferry) -> ModelCache:
    return ferry.model(IDENTITY)


def layers_of(value: float) -> list[torch.Tensor]:
    return [torch.full((2, 12, 1, 8), value) for _ in range(2)]


def after_a_pull(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Let something happen between a fetch's transfer and its end."""

    def pull(*arguments: object, **named: object) -> PullOutcome:
        outcome = pull_loads(*arguments, **named)  # type: ignore[arg-type]
        do()
        return outcome

    monkeypatch.setattr(client_cache, "pull_loads", pull)


def test_what_was_stored_is_a_miss_and_what_is_stored_then_is_found(cache: ModelCache) -> None:
    assert cache.store(TOKENS, layers_of(1.0)) == 12
    assert cache.reset() == 3
    assert cache.lookup(TOKENS).num_tokens == 0
    assert cache.fetch(TOKENS, layers_of(0.0)) == 0

    # Under the same hashes, whose old bytes still lie in the store's memory.
    assert cache.store(TOKENS, layers_of(2.0)) == 12
    into = layers_of(0.0)
    assert cache.fetch(TOKENS, into) == 12
    assert all(bool((layer == 2.0).all()) for layer in into)


def test_what_was_fetched_while_it_was_reset_does_not_count(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(TOKENS, layers_of(1.0))
    after_a_pull(monkeypatch, cache.reset)
    assert cache.fetch(TOKENS, layers_of(0.0)) == 0


def test_a_fetch_at_whose_end_the_coordinator_is_gone_does_not_count(
    cache: ModelCache, ferry: Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(TOKENS, layers_of(1.0))
    after_a_pull(monkeypatch, ferry._control.close)
    with pytest.raises(UnavailableError):
        cache.fetch(TOKENS, layers_of(0.0))


def test_a_lease_from_before_has_not_lasted(cache: ModelCache, ferry: Ferry) -> None:
    cache.store(TOKENS, layers_of(1.0))
    with cache.lease(TOKENS, ttl_s=30.0) as lease:
        cache.reset()
        assert not lease.has_lasted()
    with cache.lease(TOKENS, ttl_s=30.0) as nothing:
        assert not nothing.has_lasted()
    cache.store(TOKENS, layers_of(2.0))
    with cache.lease(TOKENS, ttl_s=30.0) as lease:
        assert lease.has_lasted()
    assert ferry.describe().num_leases == 0
