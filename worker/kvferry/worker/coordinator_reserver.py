"""Destination blocks for a Store, asked of the coordinator that owns this instance's pool."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence

from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import BlockHash, BlockId, Epoch, GroupId, Incarnation, InstanceId, LeaseId
from kvferry.proto.messages import Command, Done, EndReservation, Reply, Reserve, Reserved, expect

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

    def reserve(
        self, group_id: GroupId, hashes: Sequence[BlockHash]
    ) -> tuple[LeaseId, Sequence[BlockId | None]]:
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
        return reserved.reservation_id, reserved.block_ids

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        """Say that the writer is closed and the first `num_written` hashes are completely here.

        An end that gets lost keeps the blocks reserved for the rest of this life, so it is tried
        `END_ATTEMPTS` times.

        Raises:
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
        # Repeating is safe: the coordinator answers the same call_id with the same reply.
        for attempts_left in reversed(range(END_ATTEMPTS)):
            try:
                expect(self._call(command), Done)
                return
            except KvferryError as error:
                if not error.retryable or not attempts_left:
                    raise
                _log.warning("reservation %s could not be ended yet: %s", reservation_id, error)
                time.sleep(END_PAUSE_S)

    def _next_call_id(self) -> str:
        return f"{self._instance_id}/{self._incarnation}/store-{next(self._numbers)}"
