"""The receiving side of a Store: reserve blocks, put frames into them, say how far it came."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvferry.proto.errors import InvariantError, KvferryError, TransferError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, LeaseId, pack_group
from kvferry.worker.frames import Frame, Header, Place
from kvferry.worker.pull import receive
from kvferry.worker.residency import Residency
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import StoreAsk

_log = logging.getLogger(__name__)

Write = Callable[[Sequence[Place], memoryview], None]
"""Puts canonical bytes where they belong in the KV memory; returns when they are there."""


class Reserver(Protocol):
    """Whoever owns this worker's blocks."""

    def reserve(
        self, group_id: GroupId, hashes: Sequence[BlockHash]
    ) -> tuple[LeaseId, Sequence[BlockId | None]]:
        """Return a reservation with one block of the group per hash, None where it is here already.

        Raises:
            KvferryError: there is no room, or the owner does not answer.
        """

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        """Say that the writer is closed and the first `num_written` hashes are completely here.

        Raises:
            KvferryError: the owner refuses, or does not answer however often it is told.
        """


def accept_blocks(
    ask: StoreAsk,
    parts: Iterable[StoreAsk | Frame],
    session: PullSession,
    *,
    write: Write,
    residency: Residency,
    reserver: Reserver,
) -> int:
    """Put the frames after a client's header into reserved blocks; return how many are stored.

    The count is the length of a prefix of the hashes. Frames of blocks that are here already are
    read and dropped. Whatever ends the transfer, blocks that came whole and in order are kept and
    the reservation is ended.

    Raises:
        TransferError: what the session refused.
        KvferryError: what the reserver raised.
    """
    session.open(Header(incarnation=0, num_found=len(ask.hashes), geometry=ask.geometry))
    reservation_id, block_ids = reserver.reserve(ask.group_id, ask.hashes)

    def place(frame: Frame) -> None:
        payload = memoryview(frame.payload)
        for segment in frame.segments:
            block_id = block_ids[segment.hash_index]
            if block_id is not None:
                where = Place(block_id, segment.layer_start, segment.layer_end)
                write([where], payload[segment.offset : segment.offset + segment.length])

    def settle() -> int:
        num_stored = session.num_complete
        residency.mark_written(
            (pack_group(block_hash, ask.group_id), block_id)
            for block_hash, block_id in zip(
                ask.hashes[:num_stored], block_ids[:num_stored], strict=True
            )
            if block_id is not None
        )
        reserver.end(reservation_id, num_stored)
        return num_stored

    try:
        if len(block_ids) != len(ask.hashes):
            raise InvariantError(
                "a reservation of a wrong size", given=len(block_ids), allowed=len(ask.hashes)
            )
        residency.mark_reused(block_id for block_id in block_ids if block_id is not None)
        receive(_frames(parts), session, place)
    except BaseException:
        try:
            settle()
        except KvferryError:
            # What ended the transfer is what the client must hear.
            _log.exception("reservation %s was not ended; its blocks are lost", reservation_id)
        raise
    return settle()


def _frames(parts: Iterable[StoreAsk | Frame]) -> Iterator[Frame]:
    for part in parts:
        if isinstance(part, StoreAsk):
            raise TransferError("a second header in a store", allowed="frames")
        yield part
