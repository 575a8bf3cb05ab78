from dataclasses import replace
from typing import Any

import pytest

from kvferry.proto.errors import ConfigError
from kvferry.proto.specs import (
    AttentionSpec,
    ChunkedLocalSpec,
    CrossSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    RequestLimits,
    SinkSpec,
    SlidingWindowSpec,
)

FULL = FullSpec(block_tokens=16, kv_heads=8, head_dim=64, dtype="bfloat16")
WINDOW = SlidingWindowSpec(block_tokens=4, kv_heads=1, head_dim=8, dtype="float32", window_tokens=6)
MLA = MlaSpec(block_tokens=64, kv_heads=1, head_dim=576, dtype="bfloat16")
SINK = SinkSpec(block_tokens=16, kv_heads=8, head_dim=64, dtype="bfloat16", sink_tokens=16)
CHUNKED = ChunkedLocalSpec(block_tokens=4, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=8)
CROSS = CrossSpec(block_tokens=16, kv_heads=1, head_dim=8, dtype="float32")
STATE = MambaSpec(block_tokens=512, shapes=((2, 512), (3, 32, 32)), dtypes=("float32", "bfloat16"))
LIMITS = RequestLimits(max_model_len=100, max_in_flight_tokens=8, max_encoder_tokens=33)


def test_a_page_holds_k_and_v_of_its_tokens() -> None:
    assert FULL.page_bytes == 16 * 8 * (64 + 64) * 2 == 32_768


def test_a_narrower_v_makes_a_smaller_page() -> None:
    assert replace(FULL, head_dim_v=32).page_bytes == 16 * 8 * (64 + 32) * 2


def test_a_padded_page_takes_its_padding_and_holds_what_it_held() -> None:
    padded = replace(FULL, page_padded=36_864)
    assert (padded.page_bytes, padded.content_bytes) == (36_864, 32_768)


def test_an_mla_page_holds_one_vector_a_token_and_no_v() -> None:
    assert MLA.page_bytes == 64 * 576 * 2 == 73_728


def test_a_token_of_fp8_ds_mla_takes_656_bytes() -> None:
    assert replace(MLA, cache_dtype="fp8_ds_mla").page_bytes == 64 * 656 == 41_984


def test_a_state_takes_its_tensors_whatever_its_block() -> None:
    assert STATE.page_bytes == 2 * 512 * 4 + 3 * 32 * 32 * 2 == 10_240
    assert replace(STATE, block_tokens=1024).page_bytes == 10_240


def test_a_sink_layer_is_sized_as_a_full_one() -> None:
    assert SINK.page_bytes == FULL.page_bytes
    assert SINK.request_pages(LIMITS) == FULL.request_pages(LIMITS) == 7


@pytest.mark.parametrize(
    ("spec", "kind", "window_tokens"),
    [
        (FULL, "full_attention", None),
        (replace(FULL, window_tokens=64), "full_attention", None),
        (MLA, "mla_attention", None),
        (SINK, "sink_full_attention", None),
        (WINDOW, "sliding_window", 6),
        (CHUNKED, "chunked_local_attention", None),
        (STATE, "mamba", None),
        (CROSS, "cross_attention", None),
    ],
)
def test_events_have_names_for_kinds_and_tell_the_window_that_blocks_are_given_back_by(
    spec: LayerSpec, kind: str, window_tokens: int | None
) -> None:
    assert (spec.event_kind, spec.window_tokens_in_events) == (kind, window_tokens)


def test_full_layers_hold_the_longest_sequence_in_whole_blocks() -> None:
    assert FULL.request_bytes(LIMITS) == 7 * 32_768  # ceil(100 / 16)


def test_0_17_deals_tokens_over_all_context_parallel_ranks_and_0_32_over_dcp_only() -> None:
    dealt = replace(LIMITS, max_model_len=1024, dcp=2, pcp=2)
    assert FULL.request_pages(replace(dealt, profile="0.17")) == 16
    assert FULL.request_pages(dealt) == 32


def test_a_window_holds_itself_the_tokens_in_flight_and_one_block_more() -> None:
    assert WINDOW.request_pages(LIMITS) == 5  # ceil((6 - 1 + 8) / 4) + 1
    assert WINDOW.request_pages(replace(LIMITS, max_model_len=3)) == 2


def test_a_window_over_context_parallel_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be dealt .*; given: dcp=2; allowed: dcp=1"):
        WINDOW.request_bytes(replace(LIMITS, dcp=2))


def test_a_chunk_holds_itself_and_the_tokens_in_flight() -> None:
    assert CHUNKED.request_pages(LIMITS) == 4  # (8 + 8) / 4
    assert CHUNKED.request_pages(replace(LIMITS, max_model_len=9)) == 3


def test_cross_attention_holds_the_encoder_input() -> None:
    assert CROSS.request_pages(LIMITS) == 3  # ceil(33 / 16)


def test_cross_attention_without_an_encoder_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_encoder_tokens .*given: 0; allowed: >= 1"):
        CROSS.request_pages(replace(LIMITS, max_encoder_tokens=0))


@pytest.mark.parametrize(
    ("mode", "in_017", "in_032"), [("none", 3, 3), ("align", 4, 4), ("all", 8, 3)]
)
def test_the_states_of_one_request_depend_on_the_mode(mode: Any, in_017: int, in_032: int) -> None:
    spec = replace(STATE, mode=mode, speculative_blocks=2)
    limits = replace(LIMITS, max_model_len=4096)
    assert spec.request_pages(replace(limits, profile="0.17")) == in_017
    assert spec.request_pages(limits) == in_032


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (FULL, {"block_tokens": 0}, "block_tokens must be an integer; given: 0; allowed: >= 1"),
        (FULL, {"kv_heads": True}, "kv_heads must be an integer; given: True; allowed: >= 1"),
        (FULL, {"head_dim": 1.5}, "head_dim must be an integer; given: 1.5; allowed: >= 1"),
        (FULL, {"head_dim_v": 0}, "head_dim_v must be an integer; given: 0; allowed: >= 1"),
        (FULL, {"dtype": "bf16"}, "unknown dtype; given: bf16"),
        (FULL, {"page_padded": 32_767}, "given: 32767; allowed: >= 32768"),
        (FULL, {"window_tokens": 0}, "window_tokens must be an integer; given: 0"),
        (WINDOW, {"window_tokens": -1}, "window_tokens must be an integer; given: -1"),
        (CHUNKED, {"chunk_tokens": None}, "chunk_tokens must be an integer; given: None"),
        (STATE, {"dtypes": ("float32",)}, "one dtype for each shape"),
        (STATE, {"shapes": ((2, 0), (1,))}, "state shape must be an integer; given: 0"),
        (STATE, {"mode": "some"}, "unknown mode; given: some; allowed: .*none.*all.*align"),
        (STATE, {"speculative_blocks": -1}, "speculative_blocks .*given: -1; allowed: >= 0"),
    ],
)
def test_what_a_layer_cannot_be_is_refused_by_name(
    spec: AttentionSpec | MambaSpec, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(spec, **change)


def test_a_v_width_makes_no_sense_for_mla() -> None:
    with pytest.raises(ConfigError, match="an mla layer has no V; given: 64"):
        replace(MLA, head_dim_v=64)


def test_a_sink_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="sink_tokens must be an integer; given: 0"):
        replace(SINK, sink_tokens=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "0.18"}, "unknown profile; given: 0.18"),
        ({"max_model_len": -1}, "max_model_len must be an integer; given: -1; allowed: >= 1"),
        ({"dcp": 0}, "dcp must be an integer; given: 0; allowed: >= 1"),
        ({"max_encoder_tokens": -1}, "max_encoder_tokens .*given: -1; allowed: >= 0"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LIMITS, **change)
