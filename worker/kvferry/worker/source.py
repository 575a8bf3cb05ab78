"""The sending side: which asked blocks are here, and their frames, each checked after the copy."""

from collections.abc import Iterator, Sequence

from kvferry.proto.errors import InvariantError, NotFoundError
from kvferry.proto.ids import BlockHash, GroupId, pack_group
from kvferry.worker.frames import Segment, plan_frames
from kvferry.worker.outgoing import OutgoingFrame, Served
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


def read_frames(
    served: Served, hashes: Sequence[BlockHash], max_frame_bytes: int
) -> Iterator[OutgoingFrame]:
    """Return the frames of what was found for the first of `hashes`; each must be settled.

    A block that is handed out anew while it is sent ends the stream: what was copied from it is
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
) -> Iterator[OutgoingFrame]:
    for segments in plan:
        frame = OutgoingFrame(segments, served)
        yield frame
        if not frame.is_settled:
            raise InvariantError("a frame was sent without asking whether it still holds")
        if frame.lost_hash is not None:
            raise NotFoundError(
                "a block left its place while it was read",
                given={"hash_index": frame.lost_hash, "hash": hashes[frame.lost_hash].hex()},
            )
