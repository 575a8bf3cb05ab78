"""Where a worker hands its memory to other processes of the same user on the same host."""

import logging
import os
import secrets
import socket
import struct

import msgpack

from kvferry.worker.accept_loop import AcceptLoop
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.residency import Residency

_log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class MemoryDoor:
    """Listens at an abstract unix socket, which has no file and ends with its process.

    Whoever connects is sent one message, `incarnation` and `num_blocks` in msgpack, with two
    descriptors: of the memory (the storages, each beginning on a page) and of the generations. Both
    are sealed, so a peer cannot write. The connection then stays open: its end tells each side that
    the other has ended.

    Args:
        memory, residency: with an arena each.
        incarnation: this life of the worker.
    """

    def __init__(self, memory: KvMemory, residency: Residency, incarnation: int) -> None:
        assert memory.arena is not None
        assert residency.arena is not None
        self._arenas = (memory.arena, residency.arena)
        self._message = msgpack.packb({"incarnation": incarnation, "num_blocks": memory.num_blocks})
        self.name = f"kvferry-{secrets.token_hex(16)}"
        self._readers: list[socket.socket] = []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{self.name}")
        listener.listen()
        self._accepting = AcceptLoop(listener, self._take, name="kvferry-door")

    def close(self) -> None:
        """Hand out no more; what was handed out stays. Repeating is fine."""
        self._accepting.close()
        for reader in self._readers:
            reader.close()

    def _take(self, connection: socket.socket, _: object) -> None:
        self._readers = [one for one in self._readers if not _has_left(one)]
        if self._hand_out(connection):
            self._readers.append(connection)
        else:
            connection.close()

    def _hand_out(self, connection: socket.socket) -> bool:
        connection.settimeout(SEND_TIMEOUT_S)
        try:
            pid, user = peer_process(connection)
            if user != os.getuid():
                _log.warning("process %d of user %d asked for this worker's memory", pid, user)
                return False
            socket.send_fds(connection, [self._message], [arena.fd for arena in self._arenas])
            connection.setblocking(False)
        except OSError as error:
            _log.warning("memory could not be handed out: %s", error)
            return False
        return True


def _has_left(reader: socket.socket) -> bool:
    """Tell whether the other side has closed the connection, and close it here then."""
    try:
        reader.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass
    reader.close()
    return True


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user
