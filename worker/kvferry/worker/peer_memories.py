"""The memory of peers on this host, mapped once for each life of a peer."""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from kvferry.proto.errors import MismatchError
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.peer_memory import ATTACH_TIMEOUT_S, PeerMemory, attach
from kvferry.worker.unusable_paths import PathUnusableError


@dataclass(frozen=True, slots=True)
class _Attached:
    """`door` is the name of the peer's socket, which is made up anew for each life of a worker."""

    door: str
    memory: PeerMemory
    connection: socket.socket


class PeerMemories:
    """Thread-safe. A peer's memory is let go when the peer ends, or another life replaces it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: dict[str, _Attached] = {}

    def of(self, peer: Peer, door: str, terms: FetchTerms) -> PeerMemory:
        """Return the memory that the peer hands out at its socket `door`.

        Raises:
            PathUnusableError: it cannot be had.
            DeadlineError, CancelledPullError: as `FetchTerms.require_s`.
        """
        with self._lock:
            known = self._attached.get(peer.address)
            if known is not None and known.door == door:
                return known.memory
        timeout_s = min(terms.require_s(), ATTACH_TIMEOUT_S)
        try:
            memory, connection = attach(door, peer, timeout_s)
        except MismatchError as error:
            raise PathUnusableError("shm", str(error)) from error
        attached = _Attached(door, memory, connection)
        with self._lock:
            replaced = self._attached.get(peer.address)
            self._attached[peer.address] = attached
        if replaced is not None:
            _hang_up(replaced)
        threading.Thread(
            target=self._follow, args=(peer.address, attached), name="kvferry-peer", daemon=True
        ).start()
        return memory

    def is_mapped(self, address: str) -> bool:
        """Return whether the memory of the peer there, or of an earlier one, is mapped."""
        with self._lock:
            return address in self._attached

    def close(self) -> None:
        """Let go of all of them; each is unmapped once nobody reads it."""
        with self._lock:
            attached, self._attached = list(self._attached.values()), {}
        for one in attached:
            _hang_up(one)

    def _follow(self, address: str, attached: _Attached) -> None:
        """Let a memory go when its connection ends; nothing is ever said on it."""
        with attached.connection as connection, suppress(OSError):
            connection.settimeout(None)
            connection.recv(1)
        with self._lock:
            if self._attached.get(address) is attached:
                del self._attached[address]


def _hang_up(attached: _Attached) -> None:
    with suppress(OSError):
        attached.connection.shutdown(socket.SHUT_RDWR)
