"""The public client with two kinds of layers: a window's move only where it still reaches."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.builders import make_identity
from tests.integration.client_service import BLOCK_TOKENS, ClientService, running_client_service

from kvferry.cluster.client import Ferry, ModelCache, connect
from kvferry.proto.errors import BusyError, ConfigError, KvferryError, TransferError
from kvferry.proto.identity import GroupSpec
from kvferry.proto.ids import BlockId

BLOCK_BYTES = 2 * BLOCK_TOKENS * 3 * 8 * 4
# The window of 6 reaches from token 16 back to token 11: of four blocks the last two are needed.
IDENTITY = make_identity(
    num_kv_heads=3,
    groups=(
        GroupSpec(kind="full", layers=(1,)),
        GroupSpec(kind="sliding_window", layers=(0, 2), window_tokens=6),
    ),
)


@pytest.fixture
def service() -> Iterator[ClientService]:
    with running_client_service(IDENTITY, num_blocks=17) as running:
        yield running


@pytest.fixture
def ferry(service: ClientService) -> Iterator[Ferry]:
    with connect(service.address, timeout_s=5.0) as connected:
        yield connected


@pytest.fixture
def cache(ferry: Ferry) -> ModelCache:
    return ferry.model(IDENTITY)


def num_bytes_stored(service: ClientService) -> int:
    return service.workers["store-0"].stats().of("stored").num_bytes


def random_layers(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, num_tokens, 3, 8, generator=generator) for _ in range(3)]


def blank_layers(num_tokens: int) -> list[torch.Tensor]:
    return [torch.full((2, num_tokens, 3, 8), -7.0) for _ in range(3)]


def assert_in_place(
    into: list[torch.Tensor], stored: list[torch.Tensor], *, window_start: int, end: int
) -> None:
    """Tokens up to `end`, in window layers from `window_start` on, are there and nothing else."""
    expected = blank_layers(into[0].shape[1])
    for layer, start in ((0, window_start), (1, 0), (2, window_start)):
        expected[layer][:, start:end] = stored[layer][:, start:end]
        assert torch.equal(into[layer], expected[layer])


@pytest.mark.parametrize("max_staging_bytes", [1 << 20, 1])
def test_a_stored_prefix_comes_back_without_what_left_the_window(
    service: ClientService,
    ferry: Ferry,
    cache: ModelCache,
    max_staging_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With 1 byte, every block is a part of its own.
    monkeypatch.setattr("kvferry.cluster.client_staging.MAX_STAGING_BYTES", max_staging_bytes)
    stored, into = random_layers(18), blank_layers(18)
    assert cache.store(range(18), stored) == 16
    (held,) = ferry.describe().instances
    assert held.num_cached_blocks == 4 + 2
    assert num_bytes_stored(service) == (4 * 1 + 2 * 2) * BLOCK_BYTES

    assert cache.lookup(range(18)).num_tokens == 16
    assert cache.fetch(range(18), into) == 16
    assert_in_place(into, stored, window_start=8, end=16)


def test_what_was_fetched_and_grew_can_be_stored_again(
    service: ClientService, cache: ModelCache
) -> None:
    computed, engine, into = random_layers(24), blank_layers(24), blank_layers(24)
    cache.store(range(16), computed)
    cache.fetch(range(16), engine)
    for layer, whole in zip(engine, computed, strict=True):
        layer[:, 16:] = whole[:, 16:]
    before = num_bytes_stored(service)

    assert cache.store(range(24), engine) == 24
    # Two more blocks: of the one full layer, and of the two window layers.
    assert num_bytes_stored(service) - before == 2 * 3 * BLOCK_BYTES
    assert cache.fetch(range(24), into) == 24
    assert_in_place(into, computed, window_start=16, end=24)


def test_a_shorter_prefix_whose_window_was_not_stored_is_a_miss_until_it_is(
    cache: ModelCache,
) -> None:
    stored = random_layers(16)
    cache.store(range(16), stored)
    assert cache.lookup(range(8)).num_tokens == 0

    assert cache.store(range(8), stored) == 8
    assert cache.lookup(range(8)).num_tokens == 8
    assert cache.lookup(range(16)).num_tokens == 16


@pytest.mark.parametrize("lost", [4, 6], ids=["full", "window"])
def test_a_block_that_one_group_lost_makes_the_fetch_a_miss(
    service: ClientService, cache: ModelCache, lost: int
) -> None:
    cache.store(range(16), random_layers(16))
    # The store took blocks 1 to 4, and 5 and 6 for the window; the coordinator does not know of
    # the loss.
    service.workers["store-0"]._started().reused([BlockId(lost)])
    assert cache.lookup(range(16)).num_tokens == 16
    assert cache.fetch(range(16), blank_layers(16)) == 0


@pytest.mark.parametrize(
    ("num_leased", "error", "said"),
    [
        # Of a prefix of 11 blocks 13 are leased, of one of 9 blocks 11; 16 can be used.
        (11, BusyError, "no room at store-0; given: needed_blocks=4, free_blocks=3"),
        # Each group alone has room, but the window's blocks take the place of the full layer's.
        (9, TransferError, "stored blocks left their place at once; given: store-0"),
    ],
)
def test_a_store_without_room_for_every_group_says_so(
    cache: ModelCache, num_leased: int, error: type[KvferryError], said: str
) -> None:
    leased = range(100, 100 + num_leased * BLOCK_TOKENS)
    cache.store(leased, random_layers(len(leased)))
    with cache.lease(leased, ttl_s=30.0), pytest.raises(error, match=said):
        cache.store(range(16), random_layers(16))
    assert cache.lookup(range(16)).num_tokens == 0
    assert cache.lookup(leased).num_tokens == len(leased)


def test_recurrent_states_are_refused_before_anybody_is_asked(
    service: ClientService, ferry: Ferry
) -> None:
    recurrent = GroupSpec(kind="mamba", layers=(0, 2), state_bytes=64)
    identity = replace(IDENTITY, groups=(IDENTITY.groups[0], recurrent))
    cache = ModelCache(ferry._control, ferry._transfer, ferry.scheme, identity)
    for call in (cache.store, cache.fetch):
        with pytest.raises(ConfigError, match="states of group 1; given: mamba"):
            call(range(16), random_layers(16))
    stats = service.workers["store-0"].stats()
    assert (stats.of("stored").num_started, stats.of("served").num_started) == (0, 0)
    (held,) = ferry.describe().instances
    assert (held.num_used_blocks, held.num_cached_blocks) == (0, 0)
