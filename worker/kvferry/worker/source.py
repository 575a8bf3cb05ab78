"""The sending side: which asked blocks are here, and their frames, each checked after the copy."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import xxhash

from kvferry.proto.errors import NotFoundError
from kvferry.proto.ids import BlockHash, GroupId, pack_group
from kvferry.worker.frames import Frame, Place, Segment, places_of
from kvferry.worker.residency import Residency, Resident

Read = Callable[[Sequence[Place]], bytes]
"""Copies the canonical bytes of places out of the KV memory."""


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


def read_frames(
    plan: Iterator[tuple[Segment, ...]],
    *,
    read: Read,
    residency: Residency,
    hashes: Sequence[BlockHash],
    residents: Sequence[Resident],
) -> Iterator[Frame]:
    """Yield the planned frames of `residents`, which were found for the first of `hashes`.

    A block that is handed out anew while it is read ends the stream: what was copied from it is
    thrown away, blocks before it are still sent.

    Raises:
        NotFoundError: a block no longer holds its hash; `given` names the index of the hash.
    """
    block_ids = [resident.block_id for resident in residents]
    for segments in plan:
        payload = read(places_of(segments, block_ids))
        # Only now, after the copy: a block that still holds its hash was not written meanwhile.
        kept = tuple(
            takewhile(lambda part: residency.still_holds(residents[part.hash_index]), segments)
        )
        if kept:
            yield make_frame(kept, payload[: kept[-1].offset + kept[-1].length])
        if len(kept) < len(segments):
            lost = segments[len(kept)].hash_index
            raise NotFoundError(
                "a block left its place while it was read",
                given={"hash_index": lost, "hash": hashes[lost].hex()},
            )
