"""Destination blocks for a store, asked of the coordinator that owns its pool."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvferry.proto.errors import (
    BusyError,
    DeadlineError,
    InvariantError,
    KvferryError,
    NotRegisteredError,
    StaleError,
    UnavailableError,
)
from kvferry.proto.ids import BlockHash, Epoch, GroupId, Incarnation, InstanceId, LeaseId
from kvferry.proto.messages import (
    Command,
    Done,
    EndReservation,
    Heard,
    Heartbeat,
    Reply,
    Reserve,
    Reserved,
    expect,
)
from kvferry.worker.reservations import Reservation

ATTEMPTS = 4
PAUSE_S = 0.5

_UNANSWERED = (UnavailableError, DeadlineError)

_log = logging.getLogger(__name__)

Call = Callable[[Command], Reply]
"""Sends one command to the coordinator; has a deadline of its own, raises kvferry's errors."""


class CoordinatorReserver:
    """The `Reserver` of an instance, while it is registered. Thread-safe.

    Args:
        call: reaches the coordinator.
        instance_id, incarnation: the instance in this life.
        epoch: that it was registered under.
        on_lost: called when the instance has to come back to its coordinator and can, since nobody
            is writing: the coordinator does not know it any more, or may keep blocks for writers
            that are gone.
    """

    def __init__(
        self,
        call: Call,
        *,
        instance_id: InstanceId,
        incarnation: Incarnation,
        epoch: Epoch,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._call = call
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._epoch = epoch
        self._is_member = True
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._num_open = 0
        # With the incarnation in front, no two calls of any life share an id.
        self._numbers = itertools.count(1)

    def beat(self, call: Call) -> Heard:
        """Tell the coordinator that the instance lives.

        Args:
            call: reaches it, with a deadline that suits a message which is repeated anyway.

        Raises:
            NotRegisteredError: the instance has to come back.
            KvferryError: as `call`.
        """
        with self._lock:
            epoch, is_member = self._epoch, self._is_member
        if not is_member:
            raise NotRegisteredError("the instance has to come back", given=self._instance_id)
        command = Heartbeat(
            epoch=epoch, instance_id=self._instance_id, incarnation=self._incarnation
        )
        try:
            return expect(call(command), Heard)
        except NotRegisteredError:
            self.leave()
            raise

    def leave(self) -> None:
        """Reserve nothing more; writers that are at work go on."""
        with self._lock:
            self._is_member = False

    def is_quiet(self) -> bool:
        """Tell whether nobody is writing."""
        with self._lock:
            return not self._num_open

    def enter(self, epoch: Epoch) -> None:
        """Reserve again, under the epoch that the instance is registered under now.

        All writers must have ended: what they end was reserved under the last epoch.
        """
        with self._lock:
            self._epoch = epoch
            self._is_member = True

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        """Return a reservation with a block of the group per hash, None where it is here.

        Raises:
            UnavailableError: the instance has to come back to the coordinator first.
            KvferryError: the coordinator refused, or did not answer.
        """
        epoch = self._open()
        try:
            command = Reserve(
                call_id=self._next_call_id(),
                epoch=epoch,
                instance_id=self._instance_id,
                incarnation=self._incarnation,
                hashes=tuple(hashes),
                group_id=group_id,
            )
            reserved = expect(self._until_answered(command, _UNANSWERED), Reserved)
        except NotRegisteredError as error:
            self.leave()
            self._close()
            raise UnavailableError(
                f"{self._instance_id} is coming back to its coordinator: {error}"
            ) from error
        except BaseException:
            self._close()
            raise
        return Reservation(
            reservation_id=reserved.reservation_id,
            block_ids=reserved.block_ids,
            num_resets=reserved.num_resets,
        )

    def adopt(self) -> None:
        """Take note of a reservation that the coordinator made by itself; `end` must follow.

        Raises:
            UnavailableError: the instance has to come back to the coordinator first.
        """
        self._open()

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        """Say that the writer is closed and the first `num_written` hashes are completely here.

        Like `reserve`, it is said up to `ATTEMPTS` times; after that the instance comes back and
        tells anew what it holds. A coordinator that has begun another life meanwhile will hear of
        what was written in the same way.

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
        try:
            # An end needs no room: who is busy did not look at it.
            reply = self._until_answered(command, (*_UNANSWERED, BusyError))
            is_kept = expect(reply, Done).changed
        except NotRegisteredError:
            self.leave()
            is_kept = True
        except KvferryError as error:
            if error.retryable:
                self.leave()
            raise
        finally:
            self._close()
        if not is_kept:
            raise StaleError("the identity was reset while this was written", given=reservation_id)

    def _until_answered(
        self, command: Reserve | EndReservation, no_answers: tuple[type[KvferryError], ...]
    ) -> Reply:
        # Repeating is safe: the coordinator answers the same call_id with the same reply.
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return self._call(command)
            except no_answers as error:
                if not attempts_left:
                    raise
                _log.warning("%s was not answered yet: %s", command.call_id, error)
                time.sleep(PAUSE_S)
        raise InvariantError("no attempt was made", given=ATTEMPTS)

    def _open(self) -> Epoch:
        with self._lock:
            if not self._is_member:
                raise UnavailableError(f"{self._instance_id} is coming back to its coordinator")
            self._num_open += 1
            return self._epoch

    def _close(self) -> None:
        with self._lock:
            self._num_open -= 1
            may_come_back = not self._is_member and not self._num_open
        if may_come_back:
            self._on_lost()

    def _next_call_id(self) -> str:
        return f"{self._instance_id}/{self._incarnation}/store-{next(self._numbers)}"
