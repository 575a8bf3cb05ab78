"""Groups for layers of different page sizes whose pages lie side by side in one block (0.32).

With the block outermost in memory a block is as wide as the widest group, and every group packs
its layers' pages into it. So no page has to grow; instead the groups should be equally wide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from kvferry.coordinator.cache_groups import CacheGroup, type_key, uniform_group
from kvferry.proto.specs import LayerSpec, MambaSpec, ProfileName, SlidingWindowSpec


@dataclass(slots=True)
class _Bucket:
    """Layers of one type, by page size in order of first appearance."""

    spec: LayerSpec
    layers: list[str] = field(default_factory=list)
    by_page: dict[int, list[str]] = field(default_factory=dict)

    def add(self, layer: str, page_bytes: int) -> None:
        self.layers.append(layer)
        self.by_page.setdefault(page_bytes, []).append(layer)

    @property
    def repeats(self) -> int:
        """Times the pattern of one layer per page size recurs."""
        return max(map(len, self.by_page.values()))

    @property
    def is_even(self) -> bool:
        """Whether every page size has equally many layers."""
        return len(set(map(len, self.by_page.values()))) == 1

    def widest(self, num_groups: int) -> int:
        """Return the bytes per block of the widest of `num_groups` groups."""
        return sum(_ceil_div(len(names), num_groups) * page for page, names in self.by_page.items())

    def split(self, num_groups: int) -> list[list[str]]:
        """Deal the repeats of the pattern out to groups, layer names in pattern order."""
        if num_groups == 1:
            return [self.layers]
        patterns = list(zip_longest(*self.by_page.values()))
        return [
            [name for name in chain.from_iterable(patterns[first::num_groups]) if name is not None]
            for first in range(num_groups)
        ]


def packed_groups(layers: Mapping[str, LayerSpec], profile: ProfileName) -> tuple[CacheGroup, ...]:
    """Group layers by type, each keeping its page size, with groups about equally wide.

    Buckets that mix page sizes evenly stay whole and set how often the layer pattern repeats in a
    group; the others are split towards that. Layers that hold little of a sequence (states, and
    windows when no pattern is set) only fill the width that the other groups need anyway.
    """
    buckets = _buckets(layers, profile)
    repeats = _repeats_per_group(buckets)

    def fills_only(bucket: _Bucket) -> bool:
        return isinstance(bucket.spec, MambaSpec) or (
            repeats is None and isinstance(bucket.spec, SlidingWindowSpec)
        )

    def pattern_groups(bucket: _Bucket) -> int:
        return 1 if repeats is None or not bucket.is_even else _ceil_div(bucket.repeats, repeats)

    width = max(
        bucket.widest(len(bucket.layers) if fills_only(bucket) else pattern_groups(bucket))
        for bucket in buckets
    )
    groups = []
    for bucket in buckets:
        num_groups = pattern_groups(bucket)
        if fills_only(bucket):
            fitting = max(width // bucket.spec.page_bytes, 1)
            num_groups = max(num_groups, _ceil_div(len(bucket.layers), fitting))
            num_groups = min(num_groups, bucket.repeats)
        for names in bucket.split(num_groups):
            groups.append(uniform_group({name: layers[name] for name in names}))
    return tuple(groups)


def _buckets(layers: Mapping[str, LayerSpec], profile: ProfileName) -> list[_Bucket]:
    buckets: dict[tuple[object, ...], _Bucket] = {}
    for layer, spec in layers.items():
        bucket = buckets.setdefault(type_key(spec, profile), _Bucket(spec))
        bucket.add(layer, spec.page_bytes)
    return list(buckets.values())


def _repeats_per_group(buckets: Sequence[_Bucket]) -> int | None:
    even = [bucket for bucket in buckets if bucket.is_even]
    mixed = [bucket.repeats for bucket in even if len(bucket.by_page) > 1]
    return least_padding_size([bucket.repeats for bucket in even], max(mixed)) if mixed else None


def least_padding_size(counts: Sequence[int], at_least: int) -> int:
    """Return the chunk size that pads `counts` least in total when each is cut into whole chunks.

    The larger of equally good sizes; none is below `at_least` or above the largest count.
    """
    sizes = range(at_least, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
