"""The receiving side of a Store: reserve blocks, put frames into them, say how far it came."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvferry.proto.errors import TransferError
from kvferry.proto.ids import pack_group
from kvferry.worker.frames import Frame, Header, Place
from kvferry.worker.pull import receive
from kvferry.worker.reservations import Reservation, Reserver, reserving
from kvferry.worker.residency import Residency
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import StoreAsk

Write = Callable[[Sequence[Place], memoryview], None]
"""Puts canonical bytes where they belong in the KV memory; returns when they are there."""


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
    with reserving(reserver, residency, ask.group_id, ask.hashes) as reservation:
        block_ids = reservation.block_ids

        def place(frame: Frame) -> None:
            payload = memoryview(frame.payload)
            for segment in frame.segments:
                block_id = block_ids[segment.hash_index]
                if block_id is not None:
                    where = Place(block_id, segment.layer_start, segment.layer_end)
                    write([where], payload[segment.offset : segment.offset + segment.length])

        try:
            receive(_frames(parts), session, place)
        finally:
            _keep(ask, reservation, session.num_complete, residency)
    return reservation.num_written


def _keep(ask: StoreAsk, reservation: Reservation, num_complete: int, residency: Residency) -> None:
    blocks = zip(ask.hashes[:num_complete], reservation.block_ids[:num_complete], strict=True)
    residency.mark_written(
        (
            (pack_group(block_hash, ask.group_id), block_id)
            for block_hash, block_id in blocks
            if block_id is not None
        ),
        reservation.num_resets,
    )
    reservation.num_written = num_complete


def _frames(parts: Iterable[StoreAsk | Frame]) -> Iterator[Frame]:
    for part in parts:
        if isinstance(part, StoreAsk):
            raise TransferError("a second header in a store", allowed="frames")
        yield part
