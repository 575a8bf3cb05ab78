"""Where in memory every layer's blocks lie.

0.17 allocates one tensor for each position in the groups; the layers at that position share it,
since no block id is in two groups at a time:

    tensor 0   group 0's layer A | group 1's layer C      blocks 0, 1, 2 ...
    tensor 1   group 0's layer B | group 1's layer D

0.32 makes one allocation, and every group lays its layers out over all of it. LBHNC (two groups of
two layers; all pages equal, or a single group) and BLHNC (a block is as wide as the widest group):

    LBHNC   group 0   A [ 0 1 2 ... ] B [ 0 1 2 ... ]        BLHNC   0 [ A B ] 1 [ A B ] ...
            group 1   C [ 0 1 2 ... ] D [ 0 1 2 ... ]                0 [ C D ] 1 [ C D ] ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvferry.coordinator.cache_groups import CacheGroup
from kvferry.proto.specs import LayerSpec, MemoryOrder, ProfileName


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """Layers of equal pages in one allocation.

    Block `b` of the layer at index `i` starts at byte `offset + i * layer_stride + b *
    block_stride`. `num_bytes` is the size of the whole allocation. In 0.17 that is this tensor's
    alone, and a layer stride of 0 says that its layers share the bytes; in 0.32 all tensors lie in
    one.
    """

    num_bytes: int
    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int


def lay_out_tensors(
    groups: Sequence[CacheGroup], num_blocks: int, profile: ProfileName, order: MemoryOrder
) -> tuple[CacheTensor, ...]:
    """Lay out `num_blocks` blocks of the groups that one worker holds."""
    if profile == "0.17":
        return tuple(_shared_by_position(groups, num_blocks))
    return tuple(_in_one_allocation(groups, num_blocks, order))


def _shared_by_position(groups: Sequence[CacheGroup], num_blocks: int) -> Iterator[CacheTensor]:
    for at_position in zip_longest(*(group.items() for group in groups)):
        items = [item for item in at_position if item is not None]
        page = items[0][1].page_bytes
        yield CacheTensor(
            num_bytes=page * num_blocks,
            layers=tuple(layer for layer, _ in items),
            layer_stride=0,
            block_stride=page,
            offset=0,
        )


def _in_one_allocation(
    groups: Sequence[CacheGroup], num_blocks: int, order: MemoryOrder
) -> Iterator[CacheTensor]:
    block_bytes = max(group.bytes_per_block for group in groups)
    for group in groups:
        by_spec: dict[LayerSpec, list[str]] = {}
        for layer, spec in group.items():
            by_spec.setdefault(spec, []).append(layer)
        offset = 0
        for spec, layers in by_spec.items():
            page = spec.page_bytes
            layer_stride = page if order == "BLHNC" else page * num_blocks
            yield CacheTensor(
                num_bytes=block_bytes * num_blocks,
                layers=tuple(layers),
                layer_stride=layer_stride,
                block_stride=block_bytes if order == "BLHNC" else page,
                offset=offset,
            )
            offset += len(layers) * layer_stride
