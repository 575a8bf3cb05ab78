from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.coordinator.cache_groups import CacheGroup
from kvferry.coordinator.grouping import group_layers
from kvferry.coordinator.packed_groups import least_padding_size
from kvferry.proto.errors import ConfigError
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MemoryOrder,
    MlaSpec,
    ProfileName,
    SlidingWindowSpec,
)

# Pages of 1,024 bytes: 16 tokens x 1 head x (8 + 8) x 4.
FULL = FullSpec(block_tokens=16, kv_heads=1, head_dim=8, dtype="float32")
WINDOW = SlidingWindowSpec(
    block_tokens=16, kv_heads=1, head_dim=8, dtype="float32", window_tokens=64
)
CHUNKED = ChunkedLocalSpec(
    block_tokens=16, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=64
)
STATE = MambaSpec(block_tokens=16, shapes=((64,),), dtypes=("float32",))  # 256 bytes
MLA = MlaSpec(block_tokens=16, kv_heads=1, head_dim=24, dtype="float32")  # 1,536 bytes
PROFILES: tuple[ProfileName, ...] = ("0.17", "0.32")


def model(*specs: LayerSpec) -> dict[str, LayerSpec]:
    """Name the layers of a model by their position: "0", "1" and so on."""
    return {str(index): spec for index, spec in enumerate(specs)}


def shape(groups: tuple[CacheGroup, ...]) -> list[tuple[str, str]]:
    """Return kind and layers of each group, as short texts."""
    return [(group.kind, " ".join(group.layers)) for group in groups]


@pytest.mark.parametrize("profile", PROFILES)
def test_equal_layers_are_one_group(profile: ProfileName) -> None:
    assert shape(group_layers(model(FULL, FULL), profile=profile)) == [("full", "0 1")]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_model_without_cached_layers_has_no_group(profile: ProfileName) -> None:
    assert group_layers({}, profile=profile) == ()
    assert group_layers({}, profile=profile, hybrid=False) == ()


@pytest.mark.parametrize("profile", PROFILES)
def test_layers_of_one_type_and_different_bytes_are_one_uniform_group(profile: ProfileName) -> None:
    wide = replace(FULL, kv_heads=3)
    (group,) = group_layers(model(FULL, wide, MLA), profile=profile)
    assert (group.kind, group.layers, group.block_tokens) == ("uniform", ("0", "1", "2"), 16)
    assert group.page_bytes == group.bytes_per_block == 1024 + 3072 + 1536
    assert group.scheduler_spec == FULL


def test_states_of_different_sizes_share_a_group_in_0_17_only() -> None:
    larger = replace(STATE, shapes=((128,),))
    layers = model(STATE, larger)
    assert shape(group_layers(layers, profile="0.17")) == [("uniform", "0 1")]
    assert shape(group_layers(layers, profile="0.32")) == [("mamba", "0"), ("mamba", "1")]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_kind_with_the_fewest_layers_sets_the_group_size_and_layers_are_dealt_in_turn(
    profile: ProfileName,
) -> None:
    layers = model(FULL, WINDOW, WINDOW, FULL, WINDOW, WINDOW)
    assert shape(group_layers(layers, profile=profile)) == [
        ("full", "0 3"),
        ("sliding_window", "1 4"),
        ("sliding_window", "2 5"),
    ]


@pytest.mark.parametrize(
    ("num_full", "profile", "num_groups"),
    [(5, "0.17", 3), (5, "0.32", 2), (6, "0.32", 3), (4, "0.17", 2), (4, "0.32", 2)],
)
def test_a_kind_with_few_more_layers_than_the_smallest_is_not_split(
    num_full: int, profile: ProfileName, num_groups: int
) -> None:
    layers = model(*[FULL] * num_full, *[WINDOW] * 4)
    assert len(group_layers(layers, profile=profile)) == num_groups


@pytest.mark.parametrize("profile", PROFILES)
def test_a_smaller_page_grows_by_more_tokens_a_block(profile: ProfileName) -> None:
    half = replace(WINDOW, head_dim=4)
    groups = group_layers(model(FULL, half), profile=profile)
    assert [(group.block_tokens, group.page_bytes) for group in groups] == [(16, 1024), (32, 1024)]


def test_a_page_that_does_not_divide_the_largest_is_padded_in_0_32_and_refused_in_0_17() -> None:
    layers = model(FULL, replace(WINDOW, head_dim=6))
    groups = group_layers(layers, profile="0.32")
    assert [(group.block_tokens, group.page_bytes) for group in groups] == [(16, 1024), (16, 1024)]
    with pytest.raises(
        ConfigError,
        match="cannot be made equal; given: layer=1, page_bytes=768; "
        "allowed: a divisor of the largest page, 1024",
    ):
        group_layers(layers, profile="0.17")


def test_a_state_is_padded_in_0_32_and_refused_in_0_17() -> None:
    layers = model(FULL, STATE)
    groups = group_layers(layers, profile="0.32")
    assert [(group.block_tokens, group.page_bytes) for group in groups] == [(16, 1024), (16, 1024)]
    with pytest.raises(ConfigError, match=r"does not grow .*allowed: page_padded 1024"):
        group_layers(layers, profile="0.17")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_padded_page_does_not_grow(profile: ProfileName) -> None:
    padded = replace(WINDOW, head_dim=2, page_padded=512)
    with pytest.raises(ConfigError, match=r"does not grow .*given: layer=1, page_bytes=512"):
        group_layers(model(FULL, padded), profile=profile)


def test_an_mla_page_is_never_padded() -> None:
    layers = model(replace(FULL, kv_heads=4), CHUNKED, replace(MLA, head_dim=40))
    with pytest.raises(ConfigError, match="cannot be made equal; given: layer=2, page_bytes=2560"):
        group_layers(layers, profile="0.32")


def test_windows_beside_an_mla_they_cannot_equal_keep_all_tokens_in_0_32() -> None:
    layers = model(MLA, replace(WINDOW, kv_heads=4))
    (group,) = group_layers(layers, profile="0.32")
    assert (group.kind, group.layers) == ("uniform", ("0", "1"))
    assert [spec.kind for spec in group.specs] == ["mla", "full"]
    with pytest.raises(ConfigError, match="cannot be made equal"):
        group_layers(layers, profile="0.17")


@pytest.mark.parametrize("profile", PROFILES)
def test_without_the_hybrid_cache_local_layers_become_full_and_remember_their_range(
    profile: ProfileName,
) -> None:
    (windowed,) = group_layers(model(FULL, WINDOW), profile=profile, hybrid=False)
    assert windowed.specs == (replace(FULL, window_tokens=64),)
    (chunked,) = group_layers(model(FULL, CHUNKED), profile=profile, hybrid=False)
    assert chunked.specs == (replace(FULL, chunk_tokens=64),)


def test_a_layer_that_becomes_full_takes_the_full_layers_block_in_0_32_only() -> None:
    layers = model(FULL, replace(WINDOW, block_tokens=32, page_padded=2304))
    (group,) = group_layers(layers, profile="0.32", hybrid=False)
    assert group.kind == "uniform"
    assert [(spec.block_tokens, spec.page_bytes) for spec in group.specs] == [
        (16, 1024),
        (16, 2304),
    ]
    with pytest.raises(ConfigError, match="all layers must be of one type"):
        group_layers(layers, profile="0.17", hybrid=False)


@pytest.mark.parametrize("profile", PROFILES)
def test_without_the_hybrid_cache_states_beside_attention_are_refused(profile: ProfileName) -> None:
    with pytest.raises(ConfigError, match=r"one type; given: \['full', 'mamba'\]"):
        group_layers(model(FULL, STATE), profile=profile, hybrid=False)


@pytest.mark.parametrize("profile", PROFILES)
def test_without_the_hybrid_cache_layers_of_two_windows_are_refused(profile: ProfileName) -> None:
    layers = model(FULL, WINDOW, replace(WINDOW, window_tokens=32))
    with pytest.raises(ConfigError, match=r"different windows .*windows=\[32, 64\]"):
        group_layers(layers, profile=profile, hybrid=False)


@pytest.mark.parametrize("profile", PROFILES)
def test_without_the_hybrid_cache_windows_and_chunks_share_a_uniform_group(
    profile: ProfileName,
) -> None:
    (group,) = group_layers(model(FULL, WINDOW, CHUNKED), profile=profile, hybrid=False)
    assert group.kind == "uniform"
    assert [spec.kind for spec in group.specs] == ["full"] * 3


def test_full_layers_that_remember_a_window_join_those_that_do_not_in_0_32_only() -> None:
    layers = model(FULL, replace(FULL, window_tokens=64), STATE, STATE)
    assert shape(group_layers(layers, profile="0.32")) == [("full", "0 1"), ("mamba", "2 3")]
    padded = {name: replace(spec, page_padded=1024) for name, spec in layers.items()}
    assert shape(group_layers(padded, profile="0.17")) == [
        ("full", "0"),
        ("full", "1"),
        ("mamba", "2"),
        ("mamba", "3"),
    ]


def packed(*specs: LayerSpec) -> list[str]:
    groups = group_layers(model(*specs), profile="0.32", order="BLHNC")
    assert {group.kind for group in groups} == {"uniform"}
    return [" ".join(group.layers) for group in groups]


HALF = replace(WINDOW, head_dim=4)
SMALL = replace(FULL, head_dim=2)


def test_blocks_outermost_keep_every_page_size() -> None:
    groups = group_layers(model(FULL, HALF), profile="0.32", order="BLHNC")
    assert [(group.block_tokens, group.page_bytes) for group in groups] == [(16, 1024), (16, 512)]


def test_packed_windows_fill_the_width_the_others_need() -> None:
    # A block of two full layers holds four half pages.
    assert packed(FULL, FULL, *[HALF] * 9) == ["0 1", "2 5 8", "3 6 9", "4 7 10"]


def test_packed_states_fill_the_width_the_others_need() -> None:
    assert packed(FULL, *[STATE] * 6) == ["0", "1 3 5", "2 4 6"]


def test_an_even_mix_of_page_sizes_sets_the_repeats_of_a_group() -> None:
    # Two repeats of (FULL, SMALL); the six windows are split into groups of two.
    assert packed(FULL, SMALL, FULL, SMALL, *[WINDOW] * 6) == ["0 1 2 3", "4 7", "5 8", "6 9"]


def test_an_uneven_mix_stays_whole() -> None:
    assert packed(FULL, FULL, SMALL, *[CHUNKED] * 4) == ["0 1 2", "3 4 5 6"]


def test_packed_windows_of_unlike_sizes_lose_no_layer_when_split() -> None:
    assert packed(FULL, WINDOW, WINDOW, WINDOW, HALF) == ["0", "1 4", "2", "3"]


@pytest.mark.parametrize(
    ("counts", "at_least", "size"),
    [([4, 6], 1, 2), ([4, 6], 3, 6), ([5], 1, 5), ([8, 9], 4, 9), ([4, 22], 4, 4)],
)
def test_the_chunk_size_pads_least_and_is_the_largest_such(
    counts: list[int], at_least: int, size: int
) -> None:
    assert least_padding_size(counts, at_least) == size


SPECS = st.sampled_from(
    [FULL, SMALL, HALF, WINDOW, replace(WINDOW, window_tokens=32), CHUNKED, STATE, MLA]
)


@given(specs=st.lists(SPECS, min_size=1, max_size=12), order=st.sampled_from(["LBHNC", "BLHNC"]))
def test_every_layer_is_in_exactly_one_group_and_blocks_are_equally_wide(
    specs: list[LayerSpec], order: MemoryOrder
) -> None:
    layers = model(*specs)
    groups = group_layers(layers, profile="0.32", order=order)
    grouped = sorted((name for group in groups for name in group.layers), key=int)
    assert grouped == list(layers)
    assert all(group.layers for group in groups)
    if order == "LBHNC" and len(groups) > 1:
        assert len({group.page_bytes for group in groups}) == 1
