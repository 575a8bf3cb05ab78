"""A group of layers with one block table, and when layers may share one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Literal

from kvferry.proto.errors import ConfigError
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    ProfileName,
    RequestLimits,
    SlidingWindowSpec,
    SpecKind,
    WholeLengthSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share one block table.

    `specs` holds one spec for all layers or, in a `uniform` group, each layer's own: those need the
    same slots but differ in bytes. On a worker that holds none of the group's layers, `layers` is
    empty; the group still takes its block ids.
    """

    layers: tuple[str, ...]
    specs: tuple[LayerSpec, ...]
    uniform: bool = False

    @property
    def kind(self) -> SpecKind | Literal["uniform"]:
        """The kind of all layers, or "uniform"."""
        return "uniform" if self.uniform else self.scheduler_spec.kind

    @property
    def scheduler_spec(self) -> LayerSpec:
        """The spec whose rules the group's block table follows.

        Layers of a uniform group need the same slots, so any of them will do: it is the first.
        """
        return self.specs[0]

    @property
    def block_tokens(self) -> int:
        """Tokens that a block of this group covers on one rank."""
        return self.scheduler_spec.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer; in a uniform group, of all layers together."""
        return sum(spec.page_bytes for spec in self.specs)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id takes in all layers of the group."""
        return sum(spec.page_bytes for _, spec in self.items())

    def items(self) -> Iterator[tuple[str, LayerSpec]]:
        """Yield every layer with its spec, in order."""
        return zip(self.layers, self.specs if self.uniform else repeat(self.specs[0]), strict=False)

    def request_blocks(self, limits: RequestLimits) -> int:
        """Return the most block ids that one request takes from this group.

        Raises:
            ConfigError: a layer cannot be used under these limits.
        """
        return max(spec.request_pages(limits) for spec in self.specs)

    def held_by(self, layers: Mapping[str, LayerSpec]) -> "CacheGroup":
        """Return the group as a worker with these layers sees it."""
        held = [(layer, spec) for layer, spec in self.items() if layer in layers]
        specs = tuple(spec for _, spec in held) if self.uniform and held else self.specs
        return replace(self, layers=tuple(layer for layer, _ in held), specs=specs)


def uniform_group(layers: Mapping[str, LayerSpec]) -> CacheGroup:
    """Make a group in which every layer keeps its own page size."""
    return CacheGroup(layers=tuple(layers), specs=tuple(layers.values()), uniform=True)


def merged_spec(specs: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return the one spec that describes all layers, or None when no single one does.

    Full layers that differ only in a remembered window or chunk are described by one spec that
    remembers it.

    Raises:
        ConfigError: full layers remember several windows, or several chunk sizes.
    """
    first = specs[0]
    if not isinstance(first, FullSpec):
        return first if all(spec == first for spec in specs) else None
    full = [spec for spec in specs if isinstance(spec, FullSpec)]
    if len(full) < len(specs):
        return None
    windows = {spec.window_tokens for spec in full if spec.window_tokens is not None}
    chunks = {spec.chunk_tokens for spec in full if spec.chunk_tokens is not None}
    if len(windows) > 1 or len(chunks) > 1:
        raise ConfigError(
            "layers of different windows cannot share one group",
            given={"windows": sorted(windows), "chunks": sorted(chunks)},
            allowed="one window or one chunk size, or the hybrid cache",
        )
    bare = {replace(spec, window_tokens=None, chunk_tokens=None) for spec in full}
    if len(bare) > 1 or (windows and chunks):
        return None
    window, chunk = max(windows, default=None), max(chunks, default=None)
    return replace(bare.pop(), window_tokens=window, chunk_tokens=chunk)


def are_one_type(specs: Sequence[LayerSpec], profile: ProfileName) -> bool:
    """Tell whether all layers always need the same number of token slots."""
    return len({type_key(spec, profile) for spec in specs}) == 1


def type_key(spec: LayerSpec, profile: ProfileName) -> tuple[object, ...]:
    """Return what two layers must have in common to fill one block table alike."""
    match spec:
        case WholeLengthSpec():
            return ("whole length", spec.block_tokens)
        case SlidingWindowSpec():
            return (spec.kind, spec.block_tokens, spec.window_tokens)
        case ChunkedLocalSpec():
            return (spec.kind, spec.block_tokens, spec.chunk_tokens)
        case MambaSpec():
            # 0.17 lets states of different sizes share a group.
            size = None if profile == "0.17" else spec.page_bytes
            return (spec.kind, spec.block_tokens, spec.speculative_blocks, size)
        case _:
            return (spec.kind, spec.block_tokens)
