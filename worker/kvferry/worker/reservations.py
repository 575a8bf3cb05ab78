"""Blocks reserved at their owner for content that is about to be written, from begin to end."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, LeaseId
from kvferry.worker.residency import Residency

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Reservation:
    """One block per hash, None where it is here already, and the resets until then.

    `num_written` is for whoever writes: so many of the first hashes are here by now.
    """

    reservation_id: LeaseId
    block_ids: Sequence[BlockId | None]
    num_resets: int = 0
    num_written: int = 0


class Reserver(Protocol):
    """Whoever owns this worker's blocks."""

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        """Return a reservation with one block of the group per hash, None where it is here already.

        Raises:
            KvferryError: there is no room, or the owner does not answer.
        """

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        """Say that the writer is closed and the first `num_written` hashes are completely here.

        Raises:
            StaleError: a reset came in between; nothing of it is kept.
            KvferryError: the owner refuses, or does not answer however often it is told.
        """


@contextmanager
def reserving(
    reserver: Reserver, residency: Residency, group_id: GroupId, hashes: Sequence[BlockHash]
) -> Iterator[Reservation]:
    """Reserve a block for each hash that is not here; end the reservation whatever happens.

    The blocks hold nothing from then on. The writer must be closed when the `with` is left. An
    error passes on even if the end fails after it: it is what the caller must hear.

    Raises:
        InvariantError: the owner gave another number of blocks.
        BusyError: an earlier writer of one of the blocks is not closed.
        KvferryError: what the reserver raised.
    """
    reservation = reserver.reserve(group_id, hashes)
    try:
        if len(reservation.block_ids) != len(hashes):
            raise InvariantError(
                "a reservation of a wrong size",
                given=len(reservation.block_ids),
                allowed=len(hashes),
            )
        residency.reset(reservation.num_resets)
        with residency.writing([block for block in reservation.block_ids if block is not None]):
            yield reservation
    except BaseException:
        try:
            reserver.end(reservation.reservation_id, reservation.num_written)
        except KvferryError:
            _log.exception(
                "reservation %s was not ended as it should be", reservation.reservation_id
            )
        raise
    reserver.end(reservation.reservation_id, reservation.num_written)
