"""The public client against a real coordinator, control front and store, over real sockets."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.builders import make_identity
from tests.integration.client_service import BLOCK_TOKENS, ClientService, running_client_service

from kvferry.cluster.client import Ferry, ModelCache, connect
from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    DeadlineError,
    IdentityMismatchError,
    MismatchError,
    NotFoundError,
    TokenError,
    UnavailableError,
)
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.ids import BlockId, Incarnation, InstanceId
from kvferry.proto.messages import RemoveInstance

NUM_BLOCKS = 11
IDENTITY = make_identity(num_layers=2, num_kv_heads=3, weight_version="v1")


@pytest.fixture
def service() -> Iterator[ClientService]:
    with running_client_service(IDENTITY, num_blocks=NUM_BLOCKS) as running:
        yield running


@pytest.fixture
def ferry(service: ClientService) -> Iterator[Ferry]:
    with connect(service.address, timeout_s=5.0) as connected:
        yield connected


@pytest.fixture
def cache(ferry: Ferry) -> ModelCache:
    return ferry.model(IDENTITY)


def random_layers(num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, num_tokens, 3, 8, generator=generator) for _ in range(2)]


def blank_layers(num_tokens: int) -> list[torch.Tensor]:
    return [torch.full((2, num_tokens, 3, 8), -7.0) for _ in range(2)]


def assert_prefix(into: list[torch.Tensor], stored: list[torch.Tensor], num_tokens: int) -> None:
    for got, wanted in zip(into, stored, strict=True):
        assert torch.equal(got[:, :num_tokens], wanted[:, :num_tokens])
        assert bool((got[:, num_tokens:] == -7.0).all())


def test_what_one_engine_stores_another_fetches_bit_for_bit(
    service: ClientService, cache: ModelCache
) -> None:
    tokens = list(range(14))
    stored = random_layers(14)
    assert cache.store(tokens, stored) == 12

    with connect(service.address) as other:
        hit = other.model(IDENTITY).lookup(tokens)
        assert (hit.num_tokens, hit.num_blocks) == (12, 3)
        assert hit.source is not None
        assert hit.source.instance_id == "store-0"
        into = blank_layers(14)
        assert other.model(IDENTITY).fetch(tokens, into) == 12

    assert_prefix(into, stored, 12)


def test_a_prompt_that_goes_another_way_gets_the_common_full_blocks(cache: ModelCache) -> None:
    stored = random_layers(12)
    cache.store(list(range(12)), stored)
    prompt = [0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 10, 11, 12, 13]

    assert cache.lookup(prompt).num_tokens == 8
    into = blank_layers(20)
    assert cache.fetch(prompt, into) == 8
    assert_prefix(into, stored, 8)


def test_nothing_stored_is_a_clean_miss(cache: ModelCache) -> None:
    into = blank_layers(8)

    assert cache.lookup(range(8)).source is None
    assert cache.lookup([]).num_tokens == 0
    assert cache.fetch(range(8), into) == 0
    assert cache.fetch([1, 2, 3], into) == 0
    assert cache.store([1, 2, 3], into) == 0
    assert_prefix(into, into, 0)


def test_another_salt_finds_nothing(cache: ModelCache) -> None:
    cache.store(range(8), random_layers(8), RequestKeys(salt="a"))

    assert cache.lookup(range(8), RequestKeys(salt="a")).num_tokens == 8
    assert cache.lookup(range(8), RequestKeys(salt="b")).num_tokens == 0
    assert cache.lookup(range(8)).num_tokens == 0


def test_held_blocks_are_not_sent_again(service: ClientService, cache: ModelCache) -> None:
    layers = random_layers(20)
    block_bytes = 2 * BLOCK_TOKENS * 3 * 8 * 4 * 2

    def num_bytes_stored() -> int:
        return service.workers["store-0"].stats().of("stored").num_bytes

    assert cache.store(range(8), layers) == 8
    assert num_bytes_stored() == 2 * block_bytes
    assert cache.store(range(8), layers) == 8
    assert num_bytes_stored() == 2 * block_bytes
    assert cache.store(range(20), layers) == 20
    assert num_bytes_stored() == 5 * block_bytes


def test_a_long_prefix_travels_in_parts(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two blocks fit the staging memory, so nine take five parts.
    monkeypatch.setattr("kvferry.cluster.client_staging.MAX_STAGING_BYTES", 2 * 1536 + 1)
    stored, into = random_layers(36), blank_layers(36)

    assert cache.store(range(36), stored) == 36
    assert cache.fetch(range(36), into) == 36
    assert_prefix(into, stored, 36)


def test_a_full_store_keeps_the_beginning_and_says_how_much(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.cluster.client_staging.MAX_STAGING_BYTES", 4 * 1536)
    stored, into = random_layers(60), blank_layers(60)

    assert cache.store(range(60), stored) == 32
    assert cache.fetch(range(60), into) == 32
    assert_prefix(into, stored, 32)


def test_a_store_without_room_refuses_with_its_numbers(cache: ModelCache) -> None:
    cache.store(range(36), random_layers(36))
    with cache.lease(range(36), ttl_s=30.0), pytest.raises(BusyError, match="no room at store-0"):
        cache.store(range(100, 108), random_layers(8))


def test_views_of_another_memory_order_are_filled_and_read(cache: ModelCache) -> None:
    # As transformers keeps them: [2, num_kv_heads, num_tokens, head_size].
    own = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    into = [torch.zeros(2, 3, 8, 8) for _ in range(2)]

    assert cache.store(range(8), [layer.transpose(1, 2) for layer in own]) == 8
    assert cache.fetch(range(8), [layer.transpose(1, 2) for layer in into]) == 8
    assert all(torch.equal(got, wanted) for got, wanted in zip(into, own, strict=True))


def test_stores_are_preferred_and_other_instances_refuse(
    service: ClientService, cache: ModelCache
) -> None:
    service.add("decode-0", "decode", num_blocks=100)

    cache.store(range(8), random_layers(8))
    assert cache.lookup(range(8)).source is not None
    assert service.workers["store-0"].stats().of("stored").num_started == 1
    assert service.workers["decode-0"].stats().of("stored").num_started == 0
    with pytest.raises(MismatchError, match="takes no stores"):
        cache.store(range(8), random_layers(8), instance_id="decode-0")
    with pytest.raises(NotFoundError, match=r"given: nobody; allowed: \['store-0', 'decode-0'\]"):
        cache.store(range(8), random_layers(8), instance_id="nobody")


def test_another_identity_is_refused_by_field(ferry: Ferry) -> None:
    assert ferry.identities() == (IDENTITY,)
    with pytest.raises(
        IdentityMismatchError, match="weight_version=v2; allowed: weight_version=v1"
    ):
        ferry.model(replace(IDENTITY, weight_version="v2"))


def test_a_service_without_instances_misses_and_refuses_stores(
    service: ClientService, ferry: Ferry
) -> None:
    service.coordinator.call(
        RemoveInstance(
            call_id="remove",
            instance_id=InstanceId("store-0"),
            incarnation=Incarnation(1),
            reason="test",
        )
    )
    cache = ferry.model(IDENTITY)

    assert cache.fetch(range(8), blank_layers(8)) == 0
    with pytest.raises(NotFoundError, match=r"given: any instance of tiny; allowed: \[\]"):
        cache.store(range(8), random_layers(8))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (random_layers(8)[:1], "one tensor per layer; given: 1; allowed: 2"),
        (random_layers(7), r"\[0\] has a wrong shape; given: \[2, 7, 3, 8\]; .* at least 8, 3, 8"),
        ([torch.zeros(2, 8, 3, 4)] * 2, r"given: \[2, 8, 3, 4\]"),
        ([torch.zeros(8, 3, 8)] * 2, r"given: \[8, 3, 8\]"),
        ([layer.half() for layer in random_layers(8)], "dtype; given: float16; allowed: float32"),
        ([np.zeros((2, 8, 3, 8))] * 2, "no tensor; given: ndarray"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    cache: ModelCache, layers: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        cache.fetch(range(9), layers)
    with pytest.raises(BadInputError, match=message):
        cache.store(range(9), layers)


def test_tensors_that_cannot_be_written_to_are_refused_before_anything_is_asked(
    service: ClientService, cache: ModelCache, ferry: Ferry
) -> None:
    one = torch.zeros(2, 8, 3, 8)
    assert cache.store(range(8), [one, one]) == 8
    with pytest.raises(BadInputError, match=r"into\[1\] is the tensor of another layer"):
        cache.fetch(range(8), [one, one])
    with pytest.raises(BadInputError, match="into must be a sequence of tensors"):
        cache.fetch(range(8), into=None)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="not an identity; given: None"):
        ferry.model(None)  # type: ignore[arg-type]
    assert service.workers["store-0"].stats().of("served").num_started == 0


def test_time_that_runs_out_inside_a_call_is_a_deadline(cache: ModelCache) -> None:
    for call in (cache.fetch, cache.store):
        with pytest.raises(DeadlineError):
            call(range(8), random_layers(8), timeout_s=1e-9)
        with pytest.raises(BadInputError, match=r"timeout must be positive.* given: '1'"):
            call(range(8), random_layers(8), timeout_s="1")  # type: ignore[arg-type]


def test_tokens_of_any_integer_kind_are_the_same_and_others_are_refused(cache: ModelCache) -> None:
    cache.store(np.arange(8, dtype=np.uint32), random_layers(8))

    assert cache.lookup(torch.arange(8)).num_tokens == 8
    assert cache.lookup(tuple(range(8))).num_tokens == 8
    for wrong in ([1, 2, 3, True], [1, 2, 3, -4], [0.5] * 4, "text"):
        with pytest.raises(TokenError):
            cache.lookup(wrong)


def test_a_holder_that_is_gone_is_a_miss_well_before_the_deadline(
    service: ClientService, cache: ModelCache
) -> None:
    cache.store(range(8), random_layers(8))
    service.workers["store-0"].stop()
    into = blank_layers(8)
    started = time.monotonic()

    assert cache.fetch(range(8), into, timeout_s=5.0) == 0
    assert time.monotonic() - started < 4.0
    assert_prefix(into, into, 0)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:"):
        cache.store(range(100, 108), random_layers(8))


def test_what_a_holder_that_is_gone_does_not_give_another_one_does(
    service: ClientService, cache: ModelCache
) -> None:
    service.add("store-1", "store", num_blocks=50)
    tokens, stored = range(12), random_layers(12)
    for name in service.workers:
        assert cache.store(tokens, stored, instance_id=name) == 12
    for gone in ("store-0", "store-1"):
        into = blank_layers(12)
        assert cache.fetch(tokens, into) == 12
        assert_prefix(into, stored, 12)
        service.workers[gone].stop()
    assert cache.fetch(tokens, blank_layers(12)) == 0


def test_a_holder_that_lost_blocks_gives_what_it_still_has(
    service: ClientService, cache: ModelCache
) -> None:
    stored, into = random_layers(12), blank_layers(12)
    cache.store(range(12), stored)
    # The store took blocks 1, 2, 3 in order; the coordinator does not know of the loss.
    service.workers["store-0"]._started().reused([BlockId(2)])

    assert cache.lookup(range(12)).num_tokens == 12
    assert cache.fetch(range(12), into) == 4
    assert_prefix(into, stored, 4)


def test_a_holder_that_says_nothing_is_a_miss_at_the_deadline(
    service: ClientService, cache: ModelCache
) -> None:
    cache.store(range(8), random_layers(8))
    source = cache.lookup(range(8)).source
    assert source is not None
    service.workers["store-0"].stop()
    with socket.create_server(("127.0.0.1", int(source.rank_addresses[0].rpartition(":")[2]))):
        started = time.monotonic()
        assert cache.fetch(range(8), blank_layers(8), timeout_s=0.5) == 0
        assert time.monotonic() - started < 2.0


def test_leases_keep_blocks_until_released_or_expired(cache: ModelCache, ferry: Ferry) -> None:
    cache.store(range(8), random_layers(8))
    with cache.lease(range(12), ttl_s=30.0) as lease:
        assert (lease.num_tokens, lease.num_blocks) == (8, 2)
        assert ferry.describe().num_leases == 1
        assert 59.0 < lease.renew(60.0) <= 60.0
    assert ferry.describe().num_leases == 0
    assert lease.release() is False

    short = cache.lease(range(8), ttl_s=0.05)
    time.sleep(0.1)
    with pytest.raises(NotFoundError, match="unknown or ended lease"):
        short.renew(1.0)


def test_a_lease_of_nothing_can_be_released_but_not_renewed(cache: ModelCache) -> None:
    lease = cache.lease(range(8), ttl_s=1.0)

    assert (lease.num_tokens, lease.source) == (0, None)
    assert lease.release() is False
    with pytest.raises(NotFoundError, match="keeps nothing"):
        lease.renew(1.0)
    with pytest.raises(BadInputError, match="ttl_s"):
        cache.lease(range(8), ttl_s=float("nan"))


def test_fetches_and_stores_leave_no_lease_behind(cache: ModelCache, ferry: Ferry) -> None:
    cache.store(range(8), random_layers(8))
    cache.store(range(16), random_layers(16))
    cache.fetch(range(16), blank_layers(16))

    assert ferry.describe().num_leases == 0
