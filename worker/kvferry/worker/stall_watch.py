"""Ends a stream from outside while its own thread waits for the network."""

import math
import threading
import time
from collections.abc import Callable
from typing import Self


class StallWatch:
    """Within `with`, calls `stop` when nothing has moved for too long, or at a cancel or deadline.

    Args:
        stop: ends the stream; called in the watch's own thread.
        stall_s: seconds without `moved` after which the stream counts as stalled.
        poll_s: how often it looks.
        end_s: the deadline, on the monotonic clock.
        cancel: set by whoever gives the stream up.

    Attributes:
        stalled, is_late: nothing has moved for too long, or the deadline has passed; that is why it
            was stopped.
    """

    def __init__(
        self,
        stop: Callable[[], object],
        *,
        stall_s: float,
        poll_s: float,
        end_s: float = math.inf,
        cancel: threading.Event | None = None,
    ) -> None:
        self.stalled = False
        self.is_late = False
        self._stop = stop
        self._stall_s = stall_s
        self._poll_s = poll_s
        self._end_s = end_s
        self._cancel = cancel
        self._finished = threading.Event()
        self._moved_at_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="kvferry-stall", daemon=True)

    def __enter__(self) -> Self:
        self.moved()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._thread.join()

    def end(self) -> None:
        """Watch no longer: nothing is waited for any more. Repeating is fine."""
        self._finished.set()

    def moved(self) -> None:
        """Say that the peer has done its part, or that we have just done ours."""
        self._moved_at_s = time.monotonic()

    def _watch(self) -> None:
        while not self._finished.wait(self._poll_s):
            cancelled = self._cancel is not None and self._cancel.is_set()
            now_s = time.monotonic()
            self.stalled = now_s - self._moved_at_s > self._stall_s
            self.is_late = now_s > self._end_s
            if cancelled or self.stalled or self.is_late:
                self._stop()
                return
