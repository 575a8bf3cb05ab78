"""Where peers open bulk sockets: a port, one-time tickets, and the connections that showed one."""

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvferry.proto.credentials import Credentials, server_ssl_context
from kvferry.proto.errors import ConfigError, DeadlineError
from kvferry.proto.file_changes import FileChanges
from kvferry.worker.accept_loop import AcceptLoop
from kvferry.worker.bulk_wire import (
    SOCKET_BUFFER_BYTES,
    TICKET_BYTES,
    proof_of,
    receive_exactly,
    shut,
)

_log = logging.getLogger(__name__)

# A peer connects at once; one that does not is behind a wall, or gone.
TICKET_TIMEOUT_S = 5.0
# Those who say nothing hold a place for so long each.
GREETING_TIMEOUT_S = 1.5
NUM_GREETERS = 16


class Ticket:
    """The right to one connection; `secret` is what the peer shows."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(TICKET_BYTES)
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._is_void = False

    def show(self, connection: socket.socket) -> bool:
        """Hand the peer's connection over; False if nobody wants it any more."""
        with self._changed:
            if self._is_void:
                return False
            self._connection = connection
            self._changed.notify()
            return True

    def wait(self) -> socket.socket | None:
        """Return the connection of the peer that shows the ticket, None once it is void.

        Raises:
            DeadlineError: nobody came within `TICKET_TIMEOUT_S`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._connection is not None or self._is_void, TICKET_TIMEOUT_S
            )
            if self._connection is None and not self._is_void:
                raise DeadlineError(
                    "nobody came to fetch by a bulk socket", allowed=f"{TICKET_TIMEOUT_S} s"
                )
            return None if self._is_void else self._connection

    def void(self) -> None:
        """Wake who waits, and end the connection; from any thread. Repeating is fine."""
        with self._changed:
            self._is_void = True
            self._changed.notify()
            connection = self._connection
        if connection is not None:
            shut(connection)

    def close(self) -> None:
        """Make it void, and close the connection; by whoever uses it."""
        self.void()
        if self._connection is not None:
            self._connection.close()


class BulkListener:
    """Listens from construction to `close`, at a port that the system chooses.

    With credentials it speaks TLS, and takes new certificates as soon as their files change.

    Raises:
        OSError: this machine cannot listen on `host`.
        ConfigError: there is no certificate to show, or a file that cannot be used.
    """

    def __init__(self, host: str, credentials: Credentials | None = None) -> None:
        self._certificates = None if credentials is None else _Certificates(credentials)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.port: int = listener.getsockname()[1]
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Ticket] = {}
        self._places = threading.BoundedSemaphore(NUM_GREETERS)
        self._greeters = ThreadPoolExecutor(NUM_GREETERS, thread_name_prefix="kvferry-bulk")
        self._accepting = AcceptLoop(listener, self._take, name="kvferry-bulk")

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Lend a ticket; whatever connection it brought is closed at the end."""
        ticket = Ticket()
        with self._lock:
            self._waiting[ticket.secret] = ticket
        try:
            yield ticket
        finally:
            with self._lock:
                self._waiting.pop(ticket.secret, None)
            ticket.close()

    def close(self) -> None:
        """Stop listening; connections that were handed out go on. Repeating is fine."""
        self._accepting.close()
        self._greeters.shutdown(wait=False, cancel_futures=True)

    def _take(self, connection: socket.socket, peer: object) -> None:
        # One who finds no place takes gRPC; a queue would be room for those who say nothing.
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        try:
            self._greeters.submit(self._greet, connection, peer)
        except RuntimeError:  # shut down meanwhile
            connection.close()

    def _greet(self, connection: socket.socket, peer: object) -> None:
        try:
            connection.settimeout(GREETING_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            if self._certificates is not None:
                context = self._certificates.newest_context()
                connection = context.wrap_socket(connection, server_side=True)
            end_s = time.monotonic() + GREETING_TIMEOUT_S
            secret = receive_exactly(connection, TICKET_BYTES, end_s)
            with self._lock:
                ticket = self._waiting.pop(secret, None)
            if ticket is not None:
                connection.sendall(proof_of(secret))
                # Blocking from here on: whoever sends ends it by shutting it down.
                connection.settimeout(None)
                if ticket.show(connection):
                    return
            _log.warning("%s came to the bulk port without a valid ticket", peer)
        except OSError as error:
            _log.warning("%s did not show a ticket at the bulk port: %s", peer, error)
        finally:
            self._places.release()
        connection.close()


class _Certificates:
    """What a listening socket speaks TLS with, made anew when its files have changed.

    Thread-safe: at worst two threads make it anew at the same time.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._files = FileChanges(credentials.tls_files)
        self._context = server_ssl_context(credentials)

    def newest_context(self) -> ssl.SSLContext:
        """Return the context of the files as they are now, or else as they were last."""
        try:
            if self._files.changed():
                self._context = server_ssl_context(self._credentials)
        except ConfigError as error:
            # Between the two writes of a new pair the key is not the certificate's.
            _log.warning("the bulk port keeps its certificate, since the new one fails: %s", error)
        return self._context
