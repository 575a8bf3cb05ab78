"""The sending side: which asked blocks are here, and their frames, each checked after the copy."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash

from kvferry.proto.errors import NotFoundError
from kvferry.proto.ids import BlockHash, GroupId, pack_group
from kvferry.worker.block_io import gather
from kvferry.worker.chunks import Chunks
from kvferry.worker.frames import Frame, Geometry, Segment, places_of, plan_frames
from kvferry.worker.kv_memory import GroupMemory
from kvferry.worker.reshard_io import Cells
from kvferry.worker.residency import Residency, Resident
from kvferry.worker.selection import Selection


def find_prefix(
    residency: Residency, hashes: Sequence[BlockHash], group_id: GroupId
) -> list[Resident]:
    """Return the blocks that hold the first of `hashes`, up to the first one nobody holds."""
    found = []
    for block_hash in hashes:
        resident = residency.find(pack_group(block_hash, group_id))
        if resident is None:
            break
        found.append(resident)
    return found


def make_frame(segments: tuple[Segment, ...], payload: bytes) -> Frame:
    """Return the frame of a payload, with its checksum."""
    return Frame(segments=segments, checksum=xxhash.xxh3_64_intdigest(payload), payload=payload)


class Served(Protocol):
    """What a fetch is answered with: `num_found` blocks, or chunks of a selection of blocks."""

    @property
    def geometry(self) -> Geometry:
        """How they are cut."""

    @property
    def num_found(self) -> int:
        """How many of those asked for are here."""

    @property
    def last_page_bytes(self) -> int | None:
        """The page of the last one that is here, where it is smaller than that of the others."""

    def read(self, segments: Sequence[Segment]) -> bytes:
        """Return the bytes of the segments, one after the other."""

    def lost_hash(self, index: int) -> int | None:
        """Return which hash is no longer where it was found, of those that this one needs."""


class ServedBlocks:
    """Whole blocks of a group."""

    def __init__(
        self, memory: GroupMemory, residency: Residency, residents: Sequence[Resident]
    ) -> None:
        self.geometry = memory.geometry
        self.num_found = len(residents)
        self.last_page_bytes: int | None = None
        self._memory = memory
        self._residency = residency
        self._residents = residents
        self._block_ids = [resident.block_id for resident in residents]

    def read(self, segments: Sequence[Segment]) -> bytes:
        """Return the canonical bytes of the segments, one after the other."""
        return gather(self._memory, places_of(segments, self._block_ids))

    def lost_hash(self, index: int) -> int | None:
        """Return the index if the block no longer holds its hash."""
        return None if self._residency.still_holds(self._residents[index]) else index


class ServedSelection:
    """The chunks of a selection, as far as all blocks are here that a chunk has tokens of.

    Args:
        num_asked: number of blocks that the selection counts its tokens over.

    Raises:
        BadInputError: a selection that does not fit the blocks or the memory.
    """

    def __init__(
        self,
        memory: GroupMemory,
        residency: Residency,
        residents: Sequence[Resident],
        selection: Selection,
        *,
        num_asked: int,
    ) -> None:
        block_tokens = memory.geometry.block_tokens
        tokens = selection.tokens(num_asked * block_tokens)
        self._chunks = Chunks(
            memory,
            np.array([resident.block_id for resident in residents], dtype=np.int64),
            Cells(layers=selection.layers, heads=selection.heads, tokens=tokens),
        )
        self.geometry = self._chunks.geometry
        num_held = int(np.searchsorted(tokens, len(residents) * block_tokens))
        is_whole = num_held == len(tokens)
        self.num_found = (
            self._chunks.num_chunks if is_whole else num_held // self.geometry.block_tokens
        )
        self.last_page_bytes = self._chunks.last_page_bytes if is_whole else None
        self._block_tokens = block_tokens
        self._residency = residency
        self._residents = residents

    def read(self, segments: Sequence[Segment]) -> bytes:
        """Return the bytes of the segments, one after the other."""
        return self._chunks.read(segments)

    def lost_hash(self, index: int) -> int | None:
        """Return the first block that a chunk has tokens of and that no longer holds its hash."""
        for block in np.unique(self._chunks.cells_of(index).tokens // self._block_tokens).tolist():
            if not self._residency.still_holds(self._residents[block]):
                return int(block)
        return None


def read_frames(
    served: Served, hashes: Sequence[BlockHash], max_frame_bytes: int
) -> Iterator[Frame]:
    """Return the frames of what was found for the first of `hashes`.

    A block that is handed out anew while it is read ends the stream: what was copied from it is
    thrown away, blocks before it are still sent.

    Raises:
        BadInputError: a frame size out of range, at once.
        NotFoundError: from the iterator: a block no longer holds its hash; `given` names the index.
    """
    plan = plan_frames(
        served.num_found, served.geometry, max_frame_bytes, last_page_bytes=served.last_page_bytes
    )
    return _read(plan, served, hashes)


def _read(
    plan: Iterator[tuple[Segment, ...]], served: Served, hashes: Sequence[BlockHash]
) -> Iterator[Frame]:
    for segments in plan:
        payload = served.read(segments)
        # Only now, after the copy: a block that still holds its hash was not written meanwhile.
        lost = None
        kept = 0
        for segment in segments:
            lost = served.lost_hash(segment.hash_index)
            if lost is not None:
                break
            kept += 1
        if kept:
            last = segments[kept - 1]
            yield make_frame(segments[:kept], payload[: last.offset + last.length])
        if lost is not None:
            raise NotFoundError(
                "a block left its place while it was read",
                given={"hash_index": lost, "hash": hashes[lost].hex()},
            )
