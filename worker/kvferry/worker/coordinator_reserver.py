"""Destination blocks for a Store, asked of the coordinator that owns this instance's pool."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence

from kvferry.proto.errors import InvariantError, KvferryError, StaleError
from kvferry.proto.ids import BlockHash, Epoch, GroupId, Incarnation, InstanceId, LeaseId
from kvferry.proto.messages import Command, Done, EndReservation, Reply, Reserve, Reserved, expect
from kvferry.worker.reservations import Reservation

END_ATTEMPTS = 4
END_PAUSE_S = 0.5

_log = logging.getLogger(__name__)

Call = Callable[[Command], Reply]
"""Sends one command to the coordinator; has a deadline of its own, raises kvferry's errors."""


class CoordinatorReserver:
    """The `Reserver` of a registered instance, in the lives it was registered under."""

    def __init__(
        self, call: Call, *, instance_id: InstanceId, incarnation: Incarnation, epoch: Epoch
    ) -> None:
        self._call = call
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._epoch = epoch
        # With the incarnation in front, no two calls of any life share an id.
        self._numbers = itertools.count(1)

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        """Return a reservation with a block of the group per hash, None where it is here."""
        command = Reserve(
            call_id=self._next_call_id(),
            epoch=self._epoch,
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            hashes=tuple(hashes),
            group_id=group_id,
        )
        reserved = expect(self._call(command), Reserved)
        return Reservation(
            reservation_id=reserved.reservation_id,
            block_ids=reserved.block_ids,
            num_resets=reserved.num_resets,
        )

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        """Say that the writer is closed and the first `num_written` hashes are completely here.

        An end that gets lost keeps the blocks reserved for the rest of this life, so it is tried
        `END_ATTEMPTS` times.

        Raises:
            StaleError: the identity was reset meanwhile; nothing of it is kept.
            KvferryError: the coordinator refused, or did not answer the last attempt.
        """
        command = EndReservation(
            call_id=self._next_call_id(),
            epoch=self._epoch,
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            reservation_id=reservation_id,
            num_written=num_written,
        )
        if not self._until_answered(command).changed:
            raise StaleError("the identity was reset while this was written", given=reservation_id)

    def _until_answered(self, command: EndReservation) -> Done:
        # Repeating is safe: the coordinator answers the same call_id with the same reply.
        for attempts_left in reversed(range(END_ATTEMPTS)):
            try:
                return expect(self._call(command), Done)
            except KvferryError as error:
                if not error.retryable or not attempts_left:
                    raise
                lease_id = command.reservation_id
                _log.warning("reservation %s could not be ended yet: %s", lease_id, error)
                time.sleep(END_PAUSE_S)
        raise InvariantError("no attempt was made", given=END_ATTEMPTS)

    def _next_call_id(self) -> str:
        return f"{self._instance_id}/{self._incarnation}/store-{next(self._numbers)}"
