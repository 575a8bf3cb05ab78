"""The memory of peers on this host, mapped once for each life of a peer."""

import threading

from kvferry.proto.errors import MismatchError
from kvferry.worker.fetch_terms import Peer
from kvferry.worker.peer_memory import PeerMemory, attach
from kvferry.worker.unusable_paths import PathUnusableError


class PeerMemories:
    """Thread-safe. A peer's next life replaces its last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The name of a socket is made up anew for each life of a worker.
        self._memory_of: dict[str, tuple[str, PeerMemory]] = {}

    def of(self, peer: Peer, name: str) -> PeerMemory:
        """Return the memory that the peer hands out at the socket `name`.

        Raises:
            PathUnusableError: it cannot be had.
        """
        with self._lock:
            known = self._memory_of.get(peer.address)
        if known is not None and known[0] == name:
            return known[1]
        try:
            memory = attach(name, peer)
        except MismatchError as error:
            raise PathUnusableError("shm", str(error)) from error
        with self._lock:
            self._memory_of[peer.address] = (name, memory)
        return memory

    def close(self) -> None:
        """Let go of all of them; each is unmapped once nobody reads it."""
        with self._lock:
            self._memory_of.clear()
