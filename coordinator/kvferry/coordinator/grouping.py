"""From the layers of a model to groups of layers with one block table each.

Hybrid models have several kinds of layers. All groups draw block ids from one pool, so a block id
must take the same bytes in each: pages are made equal first, then every kind is split into groups
of about the same number of layers.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvferry.coordinator.cache_groups import (
    CacheGroup,
    are_one_type,
    merged_spec,
    uniform_group,
)
from kvferry.coordinator.packed_groups import packed_groups
from kvferry.proto.errors import ConfigError, InvariantError
from kvferry.proto.specs import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MemoryOrder,
    MlaSpec,
    ProfileName,
    SlidingWindowSpec,
    WholeLengthSpec,
)

Layers = Mapping[str, LayerSpec]
"""Spec by layer name, in the model's order."""

# The kind with the fewest layers sets the group size, unless the kind with the most has hardly
# more: then padding the smaller ones up to it wastes less.
_PADDED_UP_TO: Mapping[ProfileName, float] = {"0.17": 1.25, "0.32": 1.5}


def group_layers(
    layers: Layers, *, profile: ProfileName, order: MemoryOrder = "LBHNC", hybrid: bool = True
) -> tuple[CacheGroup, ...]:
    """Split a model's layers into groups; a model without cached layers has none.

    With `hybrid` off, local layers are treated as full ones, so that one group suffices.

    Raises:
        ConfigError: the page sizes cannot be made equal, or with `hybrid` off the layers cannot
            be made one type.
    """
    if not layers:
        return ()
    if not hybrid:
        layers = as_one_type(layers, profile)
    specs = tuple(layers.values())
    spec = merged_spec(specs)
    if spec is not None:
        return (CacheGroup(layers=tuple(layers), specs=(spec,)),)
    if are_one_type(specs, profile):
        return (uniform_group(layers),)
    if order == "BLHNC" and len({spec.page_bytes for spec in specs}) > 1:
        return packed_groups(layers, profile)
    try:
        equal = with_equal_pages(layers, profile)
    except ConfigError:
        if profile == "0.17" or not _may_keep_whole_length(layers):
            raise
        return (uniform_group(as_one_type(layers, profile)),)
    return _split(equal, profile)


def as_one_type(layers: Layers, profile: ProfileName) -> dict[str, LayerSpec]:
    """Treat local layers as full ones where the model has full ones; they remember their range.

    Layers that are of one type already are returned as they are.

    Raises:
        ConfigError: other kinds remain that differ.
    """
    promoted = dict(layers)
    if not _fit_one_group(promoted, profile):
        full = [spec for spec in layers.values() if isinstance(spec, WholeLengthSpec)]
        if full:
            sizes = {spec.block_tokens for spec in full}
            # 0.17 leaves a local layer its own block.
            common = sizes.pop() if profile == "0.32" and len(sizes) == 1 else None
            promoted = {layer: _promoted(spec, common) for layer, spec in layers.items()}
    if not _fit_one_group(promoted, profile):
        raise ConfigError(
            "without the hybrid cache all layers must be of one type",
            given=sorted({spec.kind for spec in layers.values()}),
            allowed="one kind, or full layers with sliding-window or chunked-local ones",
        )
    return promoted


def _fit_one_group(layers: Layers, profile: ProfileName) -> bool:
    specs = tuple(layers.values())
    return not specs or merged_spec(specs) is not None or are_one_type(specs, profile)


def _promoted(spec: LayerSpec, block_tokens: int | None) -> LayerSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalSpec):
        return spec
    full = FullSpec(
        block_tokens=block_tokens or spec.block_tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=spec.dtype,
        window_tokens=spec.window_tokens if isinstance(spec, SlidingWindowSpec) else None,
        chunk_tokens=spec.chunk_tokens if isinstance(spec, ChunkedLocalSpec) else None,
    )
    if spec.page_padded is None:
        return full
    return replace(full, page_padded=max(spec.page_padded, full.content_bytes))


def _may_keep_whole_length(layers: Layers) -> bool:
    """Whether sliding-window layers beside MLA may fall back to keeping all tokens (0.32)."""
    kinds = {type(spec) for spec in layers.values()}
    return {MlaSpec, SlidingWindowSpec} <= kinds and ChunkedLocalSpec not in kinds


def with_equal_pages(layers: Layers, profile: ProfileName) -> dict[str, LayerSpec]:
    """Bring all pages to the size of the largest: by more tokens a block, else (0.32) by padding.

    Raises:
        ConfigError: a page does not divide the largest, or cannot take more tokens.
    """
    target = max(spec.page_bytes for spec in layers.values())
    return {layer: _with_page(layer, spec, target, profile) for layer, spec in layers.items()}


def _with_page(layer: str, spec: LayerSpec, target: int, profile: ProfileName) -> LayerSpec:
    if spec.page_bytes == target:
        return spec
    is_state = isinstance(spec, MambaSpec)
    if is_state and profile == "0.32":
        return replace(spec, page_padded=target)
    ratio, rest = divmod(target, spec.page_bytes)
    if rest:
        if profile == "0.32" and isinstance(spec, AttentionSpec) and not isinstance(spec, MlaSpec):
            return replace(spec, page_padded=target)
        raise ConfigError(
            "the page sizes of the layers cannot be made equal",
            given={"layer": layer, "page_bytes": spec.page_bytes},
            allowed=f"a divisor of the largest page, {target}",
        )
    if is_state or spec.page_padded is not None:
        raise ConfigError(
            "a page that is a state, or padded, does not grow with its block",
            given={"layer": layer, "page_bytes": spec.page_bytes},
            allowed=f"page_padded {target}",
        )
    return replace(spec, block_tokens=spec.block_tokens * ratio)


def _split(layers: Layers, profile: ProfileName) -> tuple[CacheGroup, ...]:
    """Split layers of equal pages into groups of one spec and about the same number of layers."""
    kinds = _by_spec(layers, profile)
    fewest = min(len(names) for names in kinds)
    most = max(len(names) for names in kinds)
    size = most if most < fewest * _PADDED_UP_TO[profile] else fewest
    groups = []
    for names in kinds:
        num_groups = -(-len(names) // size)
        for first in range(num_groups):
            # Striding keeps the groups even on every stage of a pipeline.
            chosen = tuple(names[first::num_groups])
            spec = merged_spec([layers[name] for name in chosen])
            if spec is None:
                raise InvariantError("layers of one bucket have no common spec", given=chosen)
            groups.append(CacheGroup(layers=chosen, specs=(spec,)))
    return tuple(groups)


def _by_spec(layers: Layers, profile: ProfileName) -> list[list[str]]:
    """Return the names of layers that one spec describes, in order of first appearance."""
    equal: dict[LayerSpec, list[str]] = {}
    for name, spec in layers.items():
        equal.setdefault(spec, []).append(name)
    if profile == "0.17":
        return list(equal.values())
    buckets: list[tuple[list[LayerSpec], list[str]]] = []
    for spec, names in equal.items():
        for specs, bucket in buckets:
            if _can_merge([*specs, spec]):
                specs.append(spec)
                bucket.extend(names)
                break
        else:
            buckets.append(([spec], list(names)))
    return [bucket for _, bucket in buckets]


def _can_merge(specs: list[LayerSpec]) -> bool:
    try:
        return merged_spec(specs) is not None
    except ConfigError:  # their windows differ
        return False
