from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.coordinator.fleet import chain

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.cache_tensors import CacheTensor
from kvferry.coordinator.request_state import RequestState
from kvferry.coordinator.sizing import (
    CacheOptions,
    CachePlan,
    WorkerMemory,
    kv_cache_bytes,
    plan_cache,
)
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import GroupId, RequestId
from kvferry.proto.specs import (
    CrossSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MemoryOrder,
    ProfileName,
    RequestLimits,
    SlidingWindowSpec,
)

# One page of this layer is the unit of memory below: 16 tokens x 1 head x (1 + 1) x 4 bytes.
FULL = FullSpec(block_tokens=16, kv_heads=1, head_dim=1, dtype="float32")
UNIT = 128
WINDOW = SlidingWindowSpec(
    block_tokens=16, kv_heads=1, head_dim=1, dtype="float32", window_tokens=17
)
LIMITS = RequestLimits(max_model_len=64, max_in_flight_tokens=16)


def worker(name: str, units: int, *specs: LayerSpec) -> WorkerMemory:
    """Make a worker of its own layers with memory for `units` pages."""
    layers = {f"{name}.{index}": spec for index, spec in enumerate(specs)}
    return WorkerMemory(name=name, layers=layers, available_bytes=units * UNIT)


def plan(*workers: WorkerMemory, limits: RequestLimits = LIMITS, **options: Any) -> CachePlan:
    return plan_cache(workers, CacheOptions(limits=limits, **options))


def refusal(*workers: WorkerMemory, limits: RequestLimits = LIMITS, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        plan(*workers, limits=limits, **options)
    return refused.value


def cache_config(found: CachePlan, limits: RequestLimits, *, hash_block_tokens: int) -> CacheConfig:
    return CacheConfig(
        num_blocks=found.num_blocks,
        groups=found.group_specs,
        hash_block_tokens=hash_block_tokens,
        max_model_len=found.max_model_len,
        profile=limits.profile,
        dcp=limits.dcp,
        pcp=limits.pcp,
        max_in_flight_tokens=limits.max_in_flight_tokens,
    )


def blocks_held(tensors: tuple[CacheTensor, ...]) -> set[int]:
    return {tensor.num_bytes // (UNIT * len(tensor.layers)) for tensor in tensors}


@pytest.mark.parametrize("profile", ["0.17", "0.32"])
def test_the_seed_example_gives_131_928_blocks_of_8_192_bytes(profile: ProfileName) -> None:
    spec = FullSpec(block_tokens=16, kv_heads=2, head_dim=64, dtype="bfloat16")
    assert spec.page_bytes == 8_192
    layers = {str(index): spec for index in range(24)}
    for available in (25_938_100_224, 25_938_296_831):
        memory = WorkerMemory(name="gpu", layers=layers, available_bytes=available)
        limits = RequestLimits(max_model_len=32_768, max_in_flight_tokens=8_192, profile=profile)
        found = plan(memory, limits=limits)
        assert found.num_blocks == 131_928
        (only,) = found.workers
        if profile == "0.17":
            assert [tensor.num_bytes for tensor in only.tensors] == [1_080_754_176] * 24
        else:
            (tensor,) = only.tensors
            assert tensor.layer_stride == 1_080_754_176
            assert tensor.num_bytes == 24 * 1_080_754_176


def test_a_fraction_of_the_memory_less_the_measured_peak_is_for_the_cache() -> None:
    assert kv_cache_bytes(1000, 0.9, 250) == 650
    assert kv_cache_bytes(1000, 0.2, 250) == -50


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, True])
def test_no_fraction_of_the_memory_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="no fraction of the memory"):
        kv_cache_bytes(1000, fraction, 0)


# --- B50: a pool smaller than one request of the greatest length ------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_b50_a_pool_too_small_for_the_longest_request_is_refused_with_the_number_needed(
    num_blocks: int,
) -> None:
    error = refusal(worker("w", 1000, FULL), num_blocks=num_blocks)
    assert error.given == {
        "worker": "w",
        "max_model_len": 64,
        "needed_bytes": 4 * UNIT,
        "usable_bytes": (num_blocks - 1) * UNIT,
    }
    assert error.allowed == {"num_blocks": 5, "max_model_len": (num_blocks - 1) * 16}


def test_b50_a_pool_of_exactly_the_longest_request_and_the_null_block_is_taken() -> None:
    found = plan(worker("w", 1000, FULL), num_blocks=5)
    assert (found.num_blocks, found.max_model_len) == (5, 64)
    assert BlockPool(found.num_blocks).num_free_blocks * 16 == 64


def test_b50_memory_for_too_few_blocks_is_refused_with_the_number_needed() -> None:
    error = refusal(worker("w", 4, FULL))
    assert error.message == "one request of the greatest length does not fit into the KV cache"
    assert error.allowed == {"num_blocks": 5, "max_model_len": 48}
    assert plan(worker("w", 5, FULL)).num_blocks == 5


@pytest.mark.parametrize("num_blocks", [0, -1, 3.5, "x", True])
def test_b50_a_number_of_blocks_that_is_none_is_refused(num_blocks: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks must be an integer.*allowed: >= 1"):
        CacheOptions(limits=LIMITS, num_blocks=num_blocks)


def test_0_17_takes_a_given_number_of_blocks_whatever_it_is() -> None:
    limits = replace(LIMITS, profile="0.17")
    found = plan(worker("w", 1000, FULL), limits=limits, num_blocks=2)
    assert (found.num_blocks, found.concurrency) == (2, 0.5)


# --- B51: workers of different memory ---------------------------------------------------------


def test_b51_the_worker_with_the_fewest_blocks_decides_for_all() -> None:
    found = plan(worker("w0", 100, FULL), worker("w1", 63, FULL))
    assert found.num_blocks == 63
    assert [blocks_held(each.tensors) for each in found.workers] == [{63}, {63}]
    assert list(BlockPool(found.num_blocks).free_order()) == list(range(1, 63))


def test_b51_memory_per_layer_decides_and_not_memory() -> None:
    found = plan(
        worker("w0", 8, FULL, FULL),
        worker("w1", 9, FULL, FULL, FULL),
        limits=replace(LIMITS, max_model_len=32),
    )
    assert found.num_blocks == 3
    assert [blocks_held(each.tensors) for each in found.workers] == [{3}, {3}]


@pytest.mark.parametrize("profile", ["0.17", "0.32"])
def test_b51_a_worker_without_memory_is_named(profile: ProfileName) -> None:
    error = refusal(
        worker("w0", 0, FULL), worker("w1", 9, FULL), limits=replace(LIMITS, profile=profile)
    )
    assert error.message == "there is no memory for the KV cache"
    assert error.given["worker"] == "w0"


def test_b51_with_a_later_worker_all_are_planned_anew() -> None:
    found = plan(worker("w0", 100, FULL), worker("w1", 63, FULL), worker("w2", 40, FULL))
    assert [blocks_held(each.tensors) for each in found.workers] == [{40}, {40}, {40}]


# --- lengths, concurrency, refusals -----------------------------------------------------------


def test_the_length_is_lowered_to_what_fits_on_every_worker() -> None:
    workers = worker("w0", 4, FULL), worker("w1", 3, FULL)
    assert plan(*workers, fit_length=True).max_model_len == 32
    assert plan(worker("w0", 100, FULL), fit_length=True).max_model_len == 64


def test_when_not_even_one_token_fits_the_tightest_worker_is_named() -> None:
    error = refusal(worker("w0", 9, FULL), worker("w1", 1, FULL), fit_length=True)
    assert error.message == "not even a request of one token fits into the KV cache"
    assert error.given == {"worker": "w1", "usable_bytes": 0}
    assert error.allowed == {"usable_bytes": UNIT}


def test_every_group_of_a_hybrid_model_takes_its_blocks_from_one_pool() -> None:
    found = plan(worker("w", 14, FULL, WINDOW))
    # 4 blocks of 16 tokens, and ceil((17 - 1 + 16) / 16) + 1 for the window.
    assert (found.num_blocks, found.concurrency) == (14, 14 / (4 + 3))


def test_the_planned_groups_are_those_of_the_cache_that_hands_out_their_blocks() -> None:
    found = plan(worker("w", 14, replace(FULL, kv_heads=2), WINDOW))
    # Windows of half the bytes a token have twice the tokens in a block.
    assert found.group_specs == (replace(FULL, kv_heads=2), replace(WINDOW, block_tokens=32))
    manager = CacheManager(cache_config(found, LIMITS, hash_block_tokens=16))
    assert manager.pool.num_free_blocks == found.num_blocks - 1 == 6
    whole = RequestState(request_id=RequestId("r"), num_tokens=64, hashes=list(chain("wxyz")))
    assert manager.allocate_slots(whole, 64) == ([1, 2, 3, 4], [5, 6])
    assert [manager.config.max_held_blocks(GroupId(i)) for i in range(2)] == [None, 2]


@pytest.mark.parametrize("profile", ["0.17", "0.32"])
def test_a_uniform_group_has_the_spec_of_the_first_workers_first_layer(
    profile: ProfileName,
) -> None:
    wide = replace(FULL, kv_heads=3)
    limits = replace(LIMITS, profile=profile)
    found = plan(worker("w0", 40, wide, FULL), worker("w1", 40, FULL), limits=limits)
    assert [group.kind for group in found.workers[0].groups] == ["uniform"]
    assert found.group_specs == (wide,)
    assert cache_config(found, limits, hash_block_tokens=16).block_tokens_of(GroupId(0)) == 16


@pytest.mark.parametrize(("profile", "block_tokens"), [("0.17", 64), ("0.32", 32)])
def test_planned_blocks_are_those_of_one_rank_and_the_cache_multiplies_them(
    profile: ProfileName, block_tokens: int
) -> None:
    limits = replace(LIMITS, profile=profile, dcp=2, pcp=2)
    found = plan(worker("w", 14, FULL), limits=limits)
    assert found.group_specs == (FULL,)
    config = cache_config(found, limits, hash_block_tokens=block_tokens)
    assert config.shards_of(FULL) == limits.token_shards
    assert config.block_tokens_of(GroupId(0)) == block_tokens


def test_without_cached_layers_there_is_only_the_null_block() -> None:
    found = plan(worker("w", 14))
    assert (found.num_blocks, found.concurrency) == (1, None)
    assert (found.workers[0].groups, found.workers[0].tensors) == ((), ())
    assert found.group_specs == ()


def test_a_worker_without_layers_beside_others_is_refused() -> None:
    error = refusal(worker("w0", 9, FULL), worker("w1", 9))
    assert (error.message, error.given) == ("a worker holds no cached layer", "w1")


def test_no_workers_are_refused() -> None:
    assert refusal().message == "an instance needs at least one worker"


def test_workers_that_disagree_about_a_layer_are_refused() -> None:
    first = WorkerMemory(name="w0", layers={"a": FULL}, available_bytes=9 * UNIT)
    other = WorkerMemory(name="w1", layers={"a": WINDOW}, available_bytes=9 * UNIT)
    error = refusal(first, other)
    assert error.message == "workers disagree about a layer"
    assert (error.given["worker"], error.given["layer"]) == ("w1", "a")


def test_0_17_has_no_memory_order_with_the_block_outermost() -> None:
    with pytest.raises(ConfigError, match=r"memory order; given: BLHNC; allowed: \['LBHNC'\]"):
        CacheOptions(limits=replace(LIMITS, profile="0.17"), order="BLHNC")


# --- where the blocks lie ---------------------------------------------------------------------

STATE = MambaSpec(block_tokens=16, shapes=((8,),), dtypes=("float32",))
CROSS = CrossSpec(block_tokens=16, kv_heads=1, head_dim=1, dtype="float32")
NARROW = replace(FULL, kv_heads=2, head_dim_v=3)
SPECS = st.sampled_from([FULL, NARROW, WINDOW, replace(WINDOW, kv_heads=3), STATE, CROSS])
ROOMY = replace(LIMITS, max_encoder_tokens=16)


@given(
    first=st.lists(SPECS, min_size=1, max_size=6),
    second=st.lists(SPECS, max_size=6),
    order=st.sampled_from(["LBHNC", "BLHNC"]),
    num_blocks=st.integers(120, 125),
)
def test_the_blocks_of_a_group_never_overlap_and_lie_within_the_allocation(
    first: list[LayerSpec], second: list[LayerSpec], order: MemoryOrder, num_blocks: int
) -> None:
    workers = [
        worker(name, 10**6, *specs) for name, specs in (("a", first), ("b", second or first))
    ]
    found = plan(*workers, limits=ROOMY, order=order, num_blocks=num_blocks)
    for each in found.workers:
        (num_bytes,) = {tensor.num_bytes for tensor in each.tensors}
        for group in each.groups:
            taken: list[tuple[int, int]] = []
            pages = {layer: spec.page_bytes for layer, spec in group.items()}
            for tensor in (tensor for tensor in each.tensors if tensor.layers[0] in pages):
                for index, layer in enumerate(tensor.layers):
                    start = tensor.offset + index * tensor.layer_stride
                    for block in range(num_blocks):
                        at = start + block * tensor.block_stride
                        taken.append((at, at + pages[layer]))
            taken.sort()
            assert len(taken) == num_blocks * len(group.layers)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
            assert not taken or (taken[0][0] == 0 and taken[-1][1] <= num_bytes)


def test_0_17_lets_one_layer_of_each_group_share_a_tensor() -> None:
    found = plan(
        worker("w", 120, FULL, WINDOW, WINDOW, FULL, WINDOW),
        limits=replace(LIMITS, profile="0.17"),
    )
    (only,) = found.workers
    assert found.num_blocks == 60
    assert [(tensor.num_bytes, tensor.layers) for tensor in only.tensors] == [
        (60 * UNIT, ("w.0", "w.1", "w.2")),
        (60 * UNIT, ("w.3", "w.4")),
    ]
