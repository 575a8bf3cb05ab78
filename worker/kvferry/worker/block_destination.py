"""Whole blocks of a rank as the destination of a transfer."""

from collections.abc import Sequence

from kvferry.proto.ids import BlockId
from kvferry.worker.block_io import host_views, scatter
from kvferry.worker.frames import Segment, places_of
from kvferry.worker.group_memory import GroupMemory


class BlockDestination:
    """Block i of a transfer is `block_ids[i]` of a group."""

    def __init__(self, memory: GroupMemory, block_ids: Sequence[BlockId]) -> None:
        self._memory = memory
        self._block_ids = block_ids

    def views(self, segments: Sequence[Segment]) -> list[memoryview] | None:
        """Return the places of the segments, where the memory is the host's."""
        return host_views(self._memory, places_of(segments, self._block_ids))

    def write(self, segments: Sequence[Segment], payload: bytes | memoryview) -> None:
        """Put the canonical bytes of the segments into their blocks."""
        scatter(self._memory, places_of(segments, self._block_ids), payload)
