"""Connecting to the bulk port of a holder, with the ticket that its call has brought."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kvferry.proto.credentials import Credentials, client_ssl_context
from kvferry.proto.errors import ConfigError
from kvferry.worker.bulk_wire import (
    PROOF_BYTES,
    SOCKET_BUFFER_BYTES,
    proof_of,
    receive_exactly,
    shut,
)
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frames import BulkOffer
from kvferry.worker.unusable_paths import PathUnusableError

# Within a cluster it takes milliseconds; a wall that answers nothing costs so long.
CONNECT_TIMEOUT_S = 1.5


@contextmanager
def connected(
    peer: Peer,
    offer: BulkOffer,
    credentials: Credentials | None,
    terms: FetchTerms,
    *,
    also_stop: Callable[[Callable[[], object]], object],
) -> Iterator[socket.socket]:
    """Yield a socket to what a holder has offered; it blocks until shut down.

    `also_stop` is told what shuts it down, for whoever ends the fetch from outside.

    Raises:
        PathUnusableError: the port does not lead to the holder, or not in time.
        DeadlineError, CancelledPullError: as `FetchTerms.require_s`.
    """
    host = peer.address.rpartition(":")[0].strip("[]")
    with ExitStack() as open_until_the_end:
        end_s = time.monotonic() + min(terms.require_s(), CONNECT_TIMEOUT_S)
        try:
            connection = open_until_the_end.enter_context(
                _connect(host, offer.port, credentials, end_s - time.monotonic())
            )
            also_stop(lambda: shut(connection))
            connection.sendall(offer.ticket)
            if receive_exactly(connection, PROOF_BYTES, end_s) != proof_of(offer.ticket):
                raise PathUnusableError("bulk", f"port {offer.port} does not lead to the holder")
            # Blocking from here on: who ends the fetch shuts it down.
            connection.settimeout(None)
        except (OSError, ConfigError) as error:
            terms.require_s()
            raise PathUnusableError("bulk", f"port {offer.port}: {error}") from error
        yield connection


def _connect(
    host: str, port: int, credentials: Credentials | None, timeout_s: float
) -> socket.socket:
    """Return a socket that is plain, or speaks TLS where the call does."""
    context = None if credentials is None else client_ssl_context(credentials)
    connection = socket.create_connection((host, port), timeout=max(timeout_s, 0.001))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    if context is None or credentials is None:
        return connection
    return context.wrap_socket(connection, server_hostname=credentials.server_name)
