"""Moves of a store: blocks that the coordinator wants it to pull from peers."""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry.proto.errors import KvferryError, class_named
from kvferry.proto.ids import BlockHash, GroupId, LeaseId
from kvferry.proto.placement import shape_of
from kvferry.proto.step_messages import MAX_MOVES, Move
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.group_load import load_of_move
from kvferry.worker.reservations import Reservation, reserving
from kvferry.worker.service import WorkerService
from kvferry.worker.taking import require_takeable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Given:
    """The `Reserver` of one move: its blocks are reserved already."""

    move: Move
    reserver: CoordinatorReserver

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        return Reservation(
            reservation_id=self.move.reservation_id,
            block_ids=self.move.block_ids,
            num_resets=self.move.num_resets,
        )

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        self.reserver.end(reservation_id, num_written)


class StoreMoves:
    """Carries out moves in threads of its own, until `stop`.

    Args:
        worker: the store's.
        reserver: tells the coordinator of their ends.
        on_end: called from any thread when one has ended: there may be more.
    """

    def __init__(
        self,
        worker: WorkerService,
        reserver: CoordinatorReserver,
        on_end: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._reserver = reserver
        self._on_end = on_end
        self._cancel = threading.Event()
        # Held while a move is begun: none begins after `stop`.
        self._lock = threading.Lock()
        self._known: set[LeaseId] = set()
        self._threads = ThreadPoolExecutor(MAX_MOVES, thread_name_prefix="kvferry-move")

    def begin(self, moves: Collection[Move]) -> None:
        """Carry these out in the background, unless they were begun before; nothing after `stop`.

        Args:
            moves: all that the coordinator takes to be in flight, which it says again and again.

        Raises:
            UnavailableError: the store has to come back first, and will hear of others then.
        """
        # What is not said any more has ended there, and is never said again.
        self._known &= {move.reservation_id for move in moves}
        for move in moves:
            if move.reservation_id in self._known:
                continue
            with self._lock:
                if self._cancel.is_set():
                    return
                # From here on the store does not come back before the move has ended.
                self._reserver.adopt()
                self._threads.submit(self._carry_out, move)
            self._known.add(move.reservation_id)

    def stop(self) -> None:
        """Let those under way end soon, and begin nothing more; returns at once."""
        with self._lock:
            self._cancel.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _carry_out(self, move: Move) -> None:
        try:
            self._pull(move)
        except Exception as error:  # what did not come is computed again
            _log.warning("a move from %s failed: %s", move.source.instance_id, error)
        self._on_end()

    def _pull(self, move: Move) -> None:
        worker = self._worker
        given = _Given(move, self._reserver)
        with reserving(given, worker.residency, move.group_id, move.hashes) as reservation:
            shape = shape_of(worker.identity, move.group_id)
            require_takeable(move.source, worker.memory.layout, shape)
            outcome = worker.pull(
                source=move.source,
                lease_id=move.lease_id,
                loads=(load_of_move(move),),
                timeout_s=move.ttl_s,
                cancel=self._cancel,
                num_resets=move.num_resets,
            )
            (reservation.num_written,) = outcome.num_blocks_of_run
            if outcome.error is not None:
                kind = class_named(outcome.error_type or "") or KvferryError
                raise kind(outcome.error)
