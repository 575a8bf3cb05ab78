"""Blocks reserved at their owner for content that is about to be written, from begin to end."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, LeaseId

_log = logging.getLogger(__name__)


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


@dataclass(slots=True)
class OpenReservation:
    """One block per hash, None where it is here already.

    `num_written` is for whoever writes: so many of the first hashes are here by now.
    """

    block_ids: Sequence[BlockId | None]
    num_written: int = 0


@contextmanager
def reserving(
    reserver: Reserver, group_id: GroupId, hashes: Sequence[BlockHash]
) -> Iterator[OpenReservation]:
    """Reserve a block for each hash that is not here; end the reservation whatever happens.

    The writer must be closed when the `with` is left. An error passes on even if the end fails
    after it: it is what the caller must hear.

    Raises:
        InvariantError: the owner gave another number of blocks.
        KvferryError: what the reserver raised.
    """
    reservation_id, block_ids = reserver.reserve(group_id, hashes)
    reservation = OpenReservation(block_ids)
    try:
        if len(block_ids) != len(hashes):
            raise InvariantError(
                "a reservation of a wrong size", given=len(block_ids), allowed=len(hashes)
            )
        yield reservation
    except BaseException:
        try:
            reserver.end(reservation_id, reservation.num_written)
        except KvferryError:
            _log.exception("reservation %s was not ended; its blocks are lost", reservation_id)
        raise
    reserver.end(reservation_id, reservation.num_written)
