"""How blocks are cut into frames: many small blocks in one, a large block over several.

The canonical bytes of a block are, for each layer in order, K then V of that layer:
[num_layers, 2, block_tokens, num_kv_heads, head_size], contiguous, little-endian. The bytes of one
layer (K and V together) are a *page*; a page is never cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.ids import BlockId

DEFAULT_FRAME_BYTES = 2 << 20
BULK_FRAME_BYTES = 4 << 20

# So many blocks of 512 bytes fill a frame. A receiver makes nothing of more.
MAX_SEGMENTS = 1 << 16

# Half of the message limit set on both ends of a channel, so that envelope and payload always fit.
MAX_PAGE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a block's canonical bytes are cut. `page_bytes` is K and V of one layer."""

    num_layers: int
    page_bytes: int
    block_tokens: int

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.page_bytes < 1 or self.block_tokens < 1:
            raise ConfigError("sizes of a block must be positive", given=str(self), allowed=">= 1")
        if self.page_bytes > MAX_PAGE_BYTES:
            raise ConfigError(
                "one layer of one block is too large to be sent in one frame; use smaller blocks",
                given={"page_bytes": self.page_bytes},
                allowed=f"at most {MAX_PAGE_BYTES} bytes",
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.page_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Layers [layer_start, layer_end) of one block of one worker's memory."""

    block_id: BlockId
    layer_start: int
    layer_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Layers [layer_start, layer_end) of one block, at [offset, offset + length) of a payload.

    Of a selection, blocks are its chunks and layers are counted from its first one.
    """

    hash_index: int
    layer_start: int
    layer_end: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOffer:
    """Where the blocks that were found lie in memory that the caller may map itself.

    `socket` is the name at which the worker hands its memory out. `block_ids[i]` holds asked block
    i as long as its generation is `generations[i]`.
    """

    socket: str
    block_ids: tuple[BlockId, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkOffer:
    """The frames wait at another port of the same host, for whoever shows the ticket there."""

    port: int
    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First message of a transfer: blocks [0, num_found) of those asked for will follow.

    They follow in the same stream, or by the path that is offered.
    """

    incarnation: int
    num_found: int
    geometry: Geometry
    offer: SharedOffer | BulkOffer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Some bytes of some blocks, as they arrive; `checksum` as `frame_checksum` makes it."""

    segments: tuple[Segment, ...]
    checksum: int
    payload: bytes | memoryview


def places_of(segments: Sequence[Segment], block_ids: Sequence[BlockId]) -> list[Place]:
    """Return where each segment lives when block i of the transfer is `block_ids[i]`."""
    return [
        Place(block_ids[segment.hash_index], segment.layer_start, segment.layer_end)
        for segment in segments
    ]


def plan_frames(
    num_blocks: int,
    geometry: Geometry,
    max_frame_bytes: int = DEFAULT_FRAME_BYTES,
    *,
    last_page_bytes: int | None = None,
) -> Iterator[tuple[Segment, ...]]:
    """Yield the segments of each frame that together carry blocks [0, num_blocks) once, in order.

    A frame holds at most `max_frame_bytes`, unless one page is larger, and at most `MAX_SEGMENTS`
    segments. `last_page_bytes` is the
    page of the last block where it is smaller than that of the others.

    Raises:
        BadInputError: `max_frame_bytes` is outside 1 to `MAX_PAGE_BYTES`.
    """
    if not 1 <= max_frame_bytes <= MAX_PAGE_BYTES:
        raise BadInputError(
            "max_frame_bytes out of range",
            given=max_frame_bytes,
            allowed=f"1 to {MAX_PAGE_BYTES} bytes",
        )
    page_bytes = [geometry.page_bytes] * num_blocks
    if num_blocks and last_page_bytes is not None:
        page_bytes[-1] = last_page_bytes
    if geometry.block_bytes <= max_frame_bytes:
        blocks_per_frame = min(MAX_SEGMENTS, max_frame_bytes // geometry.block_bytes)
        return _several_blocks_each(page_bytes, geometry, blocks_per_frame)
    layers_per_frame = max(1, max_frame_bytes // geometry.page_bytes)
    return _some_layers_each(page_bytes, geometry.num_layers, layers_per_frame)


def _several_blocks_each(
    page_bytes: Sequence[int], geometry: Geometry, blocks_per_frame: int
) -> Iterator[tuple[Segment, ...]]:
    for first in range(0, len(page_bytes), blocks_per_frame):
        end = min(first + blocks_per_frame, len(page_bytes))
        yield tuple(
            Segment(
                hash_index=index,
                layer_start=0,
                layer_end=geometry.num_layers,
                offset=(index - first) * geometry.block_bytes,
                length=geometry.num_layers * page_bytes[index],
            )
            for index in range(first, end)
        )


def _some_layers_each(
    page_bytes: Sequence[int], num_layers: int, layers_per_frame: int
) -> Iterator[tuple[Segment, ...]]:
    for index, size in enumerate(page_bytes):
        for start in range(0, num_layers, layers_per_frame):
            end = min(start + layers_per_frame, num_layers)
            yield (
                Segment(
                    hash_index=index,
                    layer_start=start,
                    layer_end=end,
                    offset=0,
                    length=(end - start) * size,
                ),
            )
