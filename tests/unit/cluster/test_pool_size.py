"""From a size to a pool, and from a pool to the requests that fit."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import make_identity, make_info
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

from kvferry.cluster.serving.pool_size import KvSize, PoolPlan, plan_pool, pool_of
from kvferry.coordinator.grouping import group_layers
from kvferry.proto.errors import ConfigError, InvariantError
from kvferry.proto.group_specs import spec_of_group
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.layout import Layout
from kvferry.worker.model.config import layer_groups

BLOCK_TOKENS = 4
MODEL_LEN = 100
# K and V of 4 tokens, 1 head of 8 floats, in 2 layers.
BLOCK_BYTES = 2 * 4 * 8 * 4 * 2
FULL = make_identity(num_layers=2)
HYBRID = make_identity(
    groups=(
        GroupSpec(kind="sliding_window", layers=(0, 2), window_tokens=9),
        GroupSpec(kind="full", layers=(1, 3)),
    )
)


def plan(identity: Identity = FULL, **changes: Any) -> PoolPlan:
    values: dict[str, Any] = {
        "who": "decode-0",
        "layout": Layout(block_tokens=BLOCK_TOKENS),
        "token_budget": 8,
        "model_len": MODEL_LEN,
    }
    return plan_pool(identity, **(values | changes))


@pytest.mark.parametrize(
    "sizes",
    [{}, {"num_blocks": 9, "kv_bytes": 9}, {"num_blocks": 9, "memory_fraction": 0.5}],
)
def test_exactly_one_setting_sizes_a_pool(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one setting says how large") as refused:
        KvSize(**sizes)
    assert refused.value.given == (sizes or "none")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_blocks", value) for value in (1, 0, 2.0, "2", True)),
        *(("kv_bytes", value) for value in (0, -1, 1.0, "1", True)),
        *(("memory_fraction", value) for value in (0, 0.0, -0.5, 1.1, float("nan"), "1", True)),
    ],
)
def test_a_size_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        KvSize(**{name: value})


def test_a_given_number_of_blocks_is_taken_and_requests_are_checked_one_by_one() -> None:
    assert plan(num_blocks=11) == PoolPlan(
        num_blocks=11,
        block_bytes=BLOCK_BYTES,
        max_model_len=MODEL_LEN,
        fitting_tokens=40,
        concurrency=1.1,
    )


def test_bytes_give_as_many_blocks_as_they_hold() -> None:
    assert plan(kv_bytes=53 * BLOCK_BYTES - 1) == PoolPlan(
        num_blocks=52,
        block_bytes=BLOCK_BYTES,
        max_model_len=MODEL_LEN,
        fitting_tokens=MODEL_LEN,
        concurrency=52 / 25,
    )


def test_too_few_bytes_for_the_longest_request_are_refused_with_what_would_fit() -> None:
    # 25 blocks of 4 tokens and the null block.
    assert plan(kv_bytes=26 * BLOCK_BYTES).num_blocks == 26
    with pytest.raises(ConfigError, match="one request of the greatest length") as refused:
        plan(kv_bytes=25 * BLOCK_BYTES)
    assert refused.value.allowed == {"num_blocks": 26, "max_model_len": 96}
    assert refused.value.given["worker"] == "decode-0"


@pytest.mark.parametrize("kv_bytes", [-5, 0, BLOCK_BYTES - 1])
def test_memory_that_the_model_has_used_up_is_refused(kv_bytes: int) -> None:
    with pytest.raises(ConfigError, match="no memory for the KV cache"):
        plan(kv_bytes=kv_bytes)


@pytest.mark.parametrize("size", [{"num_blocks": 11}, {"kv_bytes": 11 * BLOCK_BYTES}])
def test_auto_bounds_requests_to_the_longest_that_fits(size: dict[str, Any]) -> None:
    planned = plan(max_model_len="auto", **size)
    assert (planned.max_model_len, planned.fitting_tokens) == (40, 40)
    assert planned.concurrency == 1.1


@pytest.mark.parametrize("size", [{"num_blocks": 11}, {"kv_bytes": 11 * BLOCK_BYTES}])
def test_a_length_that_was_asked_for_must_fit(size: dict[str, Any]) -> None:
    assert plan(max_model_len=40, **size).max_model_len == 40
    with pytest.raises(ConfigError) as refused:
        plan(max_model_len=41, **size)
    assert refused.value.allowed == {"num_blocks": 12, "max_model_len": 40}


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="beyond the model's") as refused:
        plan(num_blocks=1000, max_model_len=MODEL_LEN + 1)
    assert (refused.value.given, refused.value.allowed) == (101, "<= 100, or auto")


def test_a_pool_for_not_even_one_token_is_refused() -> None:
    # One block for the full layers, two for a window that may begin anywhere, and the null block.
    assert plan(HYBRID, num_blocks=4).fitting_tokens >= 1
    with pytest.raises(ConfigError, match="not even a request of one token"):
        plan(HYBRID, num_blocks=3)


def test_windows_take_blocks_of_the_window_and_a_step_only() -> None:
    # 25 blocks of full attention; 8 tokens of the window and 8 of a step are 4, and 1 for the edge.
    planned = plan(HYBRID, kv_bytes=60 * BLOCK_BYTES)
    assert (planned.num_blocks, planned.block_bytes) == (60, BLOCK_BYTES)
    assert planned.concurrency == 60 / 30


def test_a_plan_says_what_there_is_room_for() -> None:
    assert str(plan(num_blocks=11)) == (
        "11 blocks of 512 bytes, room for 1.10 requests of 40 tokens at once"
    )


def test_the_pool_of_a_registered_engine_is_known_from_what_it_registered() -> None:
    info = make_info(
        identity=FULL,
        block_tokens=BLOCK_TOKENS,
        num_blocks=11,
        max_model_len=MODEL_LEN,
        max_in_flight_tokens=8,
    )
    assert pool_of(info) == plan(num_blocks=11)


def test_groups_that_the_coordinator_would_not_make_are_never_served() -> None:
    split = replace(FULL, groups=tuple(GroupSpec(kind="full", layers=(i,)) for i in (0, 1)))
    with pytest.raises(InvariantError, match="groups of layers"):
        plan(split, num_blocks=11)


def pattern_config(pattern: str) -> Any:
    make_config: Any = Gemma3TextConfig
    return make_config(
        num_hidden_layers=len(pattern),
        layer_types=["full_attention" if c == "f" else "sliding_attention" for c in pattern],
        sliding_window=9,
    )


MAKE_LLAMA: Any = LlamaConfig
MAKE_QWEN: Any = Qwen2Config
WINDOWS_FROM_LAYER_21: dict[str, Any] = {
    "num_hidden_layers": 28,
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 21,
}


@pytest.mark.parametrize(
    ("config", "num_groups"),
    [
        (MAKE_LLAMA(num_hidden_layers=30), 1),
        (pattern_config("sssssf" * 4 + "ss"), 7),  # Gemma 3: 4 full layers, 22 with a window
        (pattern_config("ssf" * 2), 3),
        (pattern_config("fs" * 4), 2),
        (pattern_config("s" * 13 + "f" * 4), 5),
        (pattern_config("sf" * 4 + "s"), 2),
        (MAKE_QWEN(**WINDOWS_FROM_LAYER_21), 4),
        (MAKE_QWEN(**WINDOWS_FROM_LAYER_21 | {"max_window_layers": 0}), 1),
    ],
)
def test_a_models_groups_are_those_of_the_coordinators_rule(config: Any, num_groups: int) -> None:
    require_equal_groups(config)
    assert len(layer_groups(config)) == num_groups


@given(pattern=st.text("fs", min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_any_mix_of_layers_is_grouped_by_the_coordinators_rule(pattern: str) -> None:
    require_equal_groups(pattern_config(pattern))


def require_equal_groups(config: Any) -> None:
    identity = make_identity(groups=layer_groups(config))
    specs = {
        layer: spec_of_group(identity, group, BLOCK_TOKENS)
        for group in identity.groups
        for layer in group.layers
    }
    planned = group_layers({str(i): specs[i] for i in range(identity.num_layers)}, profile="0.32")
    assert [group.layers for group in planned] == [
        tuple(map(str, group.layers)) for group in identity.groups
    ]
