"""A Fetch under way, as its caller sees it."""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frames import Frame, Header
from kvferry.worker.stall_watch import StallWatch
from kvferry.worker.transfer_wire import FetchAsk, decode_reply

# How long a cancelled pull may go on waiting for the network.
CANCEL_POLL_S = 0.02


class _Call(Protocol):
    """A call under way; gRPC's types have no name for it."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> object: ...


class FetchStream:
    """A Fetch under way: its messages, and what ends it from outside."""

    def __init__(
        self,
        peer: Peer,
        ask: FetchAsk,
        terms: FetchTerms,
        call: _Call,
        stall_s: float,
    ) -> None:
        self.peer = peer
        self.ask = ask
        self.terms = terms
        self._call = call
        self._lock = threading.Lock()
        self._is_stopped = False
        self._also_stop: list[Callable[[], object]] = []
        self.watch = StallWatch(
            self._stop,
            stall_s=stall_s,
            poll_s=CANCEL_POLL_S,
            end_s=terms.end_s,
            cancel=terms.cancel,
        )

    def __iter__(self) -> Iterator[Header | Frame]:
        for message in self._call:
            self.terms.require_wanted()
            self.watch.moved()
            yield decode_reply(message)
            # Placing it was our own time.
            self.watch.moved()

    def next(self) -> Header | Frame | None:
        """Return the next message, None at the end."""
        return next(iter(self), None)

    def also_stop(self, stop: Callable[[], object]) -> None:
        """Call `stop` too when the stream is ended from outside; at once if it has been."""
        with self._lock:
            self._also_stop.append(stop)
            is_late = self._is_stopped
        if is_late:
            stop()

    def _stop(self) -> None:
        self._call.cancel()
        with self._lock:
            self._is_stopped = True
            stops = list(self._also_stop)
        for stop in stops:
            stop()
