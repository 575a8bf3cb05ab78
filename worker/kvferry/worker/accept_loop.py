"""A thread that takes a listening socket's connections, whatever goes wrong with one of them."""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1
CLOSE_TIMEOUT_S = 5.0

Handle = Callable[[socket.socket, object], None]
"""Takes a connection over, and the address it came from; returns soon."""


class AcceptLoop:
    """Runs from construction to `close`.

    Args:
        listener: taken over.
        handle: called for one connection at a time.
        name: of the thread, and in the log.
    """

    def __init__(self, listener: socket.socket, handle: Handle, *, name: str) -> None:
        self._listener = listener
        self._handle = handle
        self._name = name
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that were handed over go on. Repeating is fine."""
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    # Out of descriptors, or a peer that has left already: neither lasts.
                    _log.warning("%s could not accept a connection: %s", self._name, error)
                    self._is_closed.wait(ACCEPT_PAUSE_S)
                continue
            self._handle(connection, peer)
