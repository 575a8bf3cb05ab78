"""Destination blocks for a Store, asked of the coordinator that owns this instance's pool."""

import itertools
from collections.abc import Callable, Sequence

from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockHash, BlockId, Epoch, Incarnation, InstanceId, LeaseId
from kvferry.proto.messages import Command, EndReservation, Reply, Reserve, Reserved

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

    def reserve(self, hashes: Sequence[BlockHash]) -> tuple[LeaseId, Sequence[BlockId | None]]:
        """Return a reservation with one destination per hash, None where it is here already."""
        reply = self._call(
            Reserve(
                call_id=self._next_call_id(),
                epoch=self._epoch,
                instance_id=self._instance_id,
                incarnation=self._incarnation,
                hashes=tuple(hashes),
            )
        )
        if not isinstance(reply, Reserved):
            raise InvariantError(
                "the coordinator answered a Reserve with something else",
                given=type(reply).__name__,
                allowed="Reserved",
            )
        return reply.reservation_id, reply.block_ids

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        """Say that the writer is closed and the first `num_written` hashes are completely here."""
        self._call(
            EndReservation(
                call_id=self._next_call_id(),
                epoch=self._epoch,
                instance_id=self._instance_id,
                incarnation=self._incarnation,
                reservation_id=reservation_id,
                num_written=num_written,
            )
        )

    def _next_call_id(self) -> str:
        return f"{self._instance_id}/{self._incarnation}/store-{next(self._numbers)}"
