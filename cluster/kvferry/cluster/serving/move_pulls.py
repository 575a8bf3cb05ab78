"""Moves of an engine: blocks that it pulls from peers for no request, beside its loop."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvferry.proto.errors import DeadlineError, InstanceDiedError, KvferryError
from kvferry.proto.ids import LeaseId
from kvferry.proto.step_messages import MAX_MOVES, Move, MoveEnd, Source
from kvferry.worker.group_load import GroupLoad, load_of_move
from kvferry.worker.pull import PullOutcome

log = logging.getLogger(__name__)


class Puller(Protocol):
    """What pulls blocks for an engine."""

    def pull(
        self,
        *,
        source: Source,
        lease_id: LeaseId,
        loads: Sequence[GroupLoad],
        timeout_s: float,
        cancel: threading.Event,
    ) -> PullOutcome:
        """Fetch blocks from a peer; return once no write can follow.

        A peer's failure is told in the outcome.

        Raises:
            KvferryError: this instance is at fault: loads that do not fit it, or a rank that is
                gone, so that nobody knows whether it still writes.
        """


class MovePulls:
    """Pulls what it is told to; the loop calls all of this, and takes the ends along in a step.

    Args:
        puller: pulls.
        on_end: called from any thread when a move has ended.
        fail: called from any thread when nobody knows any more whether something still writes.
    """

    def __init__(
        self,
        puller: Puller,
        on_end: Callable[[], None],
        fail: Callable[[KvferryError], None],
    ) -> None:
        self._puller = puller
        self._on_end = on_end
        self._fail = fail
        self._cancels: dict[LeaseId, threading.Event] = {}
        self._ended: deque[MoveEnd] = deque()
        self._threads = ThreadPoolExecutor(MAX_MOVES, thread_name_prefix="kvferry-move")

    def begin(self, moves: Iterable[Move]) -> None:
        """Pull these in the background."""
        for move in moves:
            cancel = self._cancels[move.reservation_id] = threading.Event()
            self._threads.submit(self._pull, move, cancel)

    def any_ended(self) -> bool:
        """Tell whether there are ends to be told."""
        return bool(self._ended)

    def are_closed(self) -> bool:
        """Tell whether nothing writes."""
        return len(self._ended) == len(self._cancels)

    def take_ended(self) -> tuple[MoveEnd, ...]:
        """Return the ends since the last call."""
        ended = tuple(self._ended.popleft() for _ in range(len(self._ended)))
        for end in ended:
            del self._cancels[end.reservation_id]
        return ended

    def cancel(self) -> None:
        """Let every move end soon; repeating is fine."""
        for cancel in list(self._cancels.values()):
            cancel.set()

    def stop(self) -> None:
        """Cancel, and begin nothing more; returns at once."""
        self.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pull(self, move: Move, cancel: threading.Event) -> None:
        num_written = 0
        try:
            outcome = self._puller.pull(
                source=move.source,
                lease_id=move.lease_id,
                loads=(load_of_move(move),),
                timeout_s=move.ttl_s,
                cancel=cancel,
            )
            (num_written,) = outcome.num_blocks_of_run
            if outcome.error is not None:
                log.warning("a move from %s failed: %s", move.source.instance_id, outcome.error)
        except (InstanceDiedError, DeadlineError) as error:
            # A rank may still write into the blocks: nobody may hear that they are free.
            self._fail(error)
            return
        except Exception:  # a lost end would keep the blocks for minutes
            log.exception("a move from %s failed", move.source.instance_id)
        self._ended.append(MoveEnd(reservation_id=move.reservation_id, num_written=num_written))
        self._on_end()
