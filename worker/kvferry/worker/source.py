"""The sending side: which asked blocks are here, and their frames, each checked after the copy."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import xxhash

from kvferry.proto.errors import NotFoundError
from kvferry.proto.ids import BlockHash, GroupId, pack_group
from kvferry.worker.frames import Frame, Geometry, Segment, plan_frames
from kvferry.worker.residency import Residency, Resident


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
