"""Frames over a plain socket, from memory to memory: what stands around them, and the two loops.

The receiver begins with the ticket, and the sender answers with the proof that it knows it:
whatever else may listen at a port does not. Then, from the sender, for every frame: a prefix (bytes
of the envelope, bytes of the payload), the envelope (a protobuf Frame without its payload), the
payload, and a trailer (the frame's checksum, and whether the frame counts). All numbers are
little-endian. Bytes leave straight from memory that may be handed out anew meanwhile, so only the
trailer tells whether they were what they should be; a frame that does not count may come again,
shorter.
"""

import hashlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ssl import SSLSocket

from google.protobuf.message import DecodeError

from kvferry.proto.errors import TransferError, UnavailableError
from kvferry.worker.checksum import SegmentDigest, in_windows
from kvferry.worker.destination import Destination
from kvferry.worker.frame_wire import MAX_ENVELOPE_BYTES, decode_envelope, encode_envelope
from kvferry.worker.frames import MAX_PAGE_BYTES, Segment
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.transfer_session import PullSession

TICKET_BYTES = 16
PROOF_BYTES = 16
# A connection lives for one fetch, too short for the kernel to find out how much it may hold.
SOCKET_BUFFER_BYTES = 4 << 20
# Linux takes so many pieces in one call.
MAX_PIECES = 1024

_PREFIX = struct.Struct("<II")
_TRAILER = struct.Struct("<QB")


def proof_of(ticket: bytes) -> bytes:
    """Return what the side that handed a ticket out says when it is shown."""
    return hashlib.sha256(b"kvferry" + ticket).digest()[:PROOF_BYTES]


def receive_exactly(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Return the next bytes, or fewer if the connection ends or the time is over.

    Args:
        connection: any socket; its timeout is changed.
        num_bytes: how many are wanted.
        end_s: until when, on the monotonic clock.

    Raises:
        OSError: the connection broke, or the time is over.
    """
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        part = connection.recv(num_bytes - len(received))
        if not part:
            break
        received += part
    return received


def send_frame(connection: socket.socket, frame: OutgoingFrame) -> None:
    """Send a frame, or as much of it as still holds once it is sent, and settle it.

    Raises:
        OSError: the connection is gone.
    """
    while True:
        envelope = encode_envelope(frame.segments)
        prefix = _PREFIX.pack(len(envelope), sum(map(len, frame.pieces)))
        head = [memoryview(prefix + envelope)]
        for window in frame.hashed_windows():
            _send_pieces(connection, head + window)
            head = []
        kept = frame.settle()
        counts = kept == len(frame.segments)
        connection.sendall(_TRAILER.pack(frame.checksum, counts))
        if counts or not kept:
            return
        frame = frame.first(kept)


def receive_frames(
    connection: socket.socket,
    session: PullSession,
    destination: Destination,
    moved: Callable[[], None],
) -> None:
    """Put frames in place until everything is there or the sender closes the connection.

    Args:
        connection: as the sender's.
        session: open already.
        destination: takes the bytes; those of a frame that turns out bad may have been written.
        moved: is called after each frame.

    Raises:
        TransferError: what the session refused, or a frame too large.
        UnavailableError: the connection is gone in the middle of a frame.
    """
    spare = bytearray()
    trailer = memoryview(bytearray(_TRAILER.size))
    while not session.is_finished:
        segments, payload_bytes = _read_head(connection)
        if not segments:
            return
        session.admit_segments(segments, payload_bytes)
        views = destination.views(segments)
        if views is None and len(spare) < payload_bytes:
            spare = bytearray(payload_bytes)
        pieces = [memoryview(spare)[:payload_bytes]] if views is None else views
        digest = SegmentDigest(segments)
        for window in in_windows(pieces):
            _read_pieces(connection, window)
            digest.update(window)
        _read_pieces(connection, [trailer])
        checksum, counts = _TRAILER.unpack(trailer)
        if counts:
            session.verify(digest.checksums, checksum)
            if views is None:
                destination.write(segments, pieces[0])
            session.placed(segments)
        moved()


def shut(connection: socket.socket) -> None:
    """End a connection that another thread reads or writes."""
    with suppress(OSError):
        # A TLS socket's own way would let the other thread go on in plaintext for a moment.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _read_head(connection: socket.socket) -> tuple[tuple[Segment, ...], int]:
    """Return where the next frame belongs and its bytes; nothing at a proper end."""
    prefix = memoryview(bytearray(_PREFIX.size))
    if not _read_pieces(connection, [prefix], may_end=True):
        return (), 0
    envelope_bytes, payload_bytes = _PREFIX.unpack(prefix)
    if envelope_bytes > MAX_ENVELOPE_BYTES or payload_bytes > MAX_PAGE_BYTES:
        raise TransferError(
            "a frame too large",
            given=f"{envelope_bytes} + {payload_bytes} bytes",
            allowed=f"{MAX_ENVELOPE_BYTES} + {MAX_PAGE_BYTES} bytes",
        )
    envelope = memoryview(bytearray(envelope_bytes))
    _read_pieces(connection, [envelope])
    try:
        segments, _ = decode_envelope(bytes(envelope))
    except DecodeError as error:
        raise TransferError("not the envelope of a frame", given=f"{len(envelope)} B") from error
    if not segments:
        raise TransferError("a frame without segments")
    return segments, payload_bytes


def _send_pieces(connection: socket.socket, pieces: list[memoryview]) -> None:
    if isinstance(connection, SSLSocket):
        connection.sendall(b"".join(pieces))
        return
    while pieces:
        pieces = _after(pieces, connection.sendmsg(pieces[:MAX_PIECES]))


def _read_pieces(
    connection: socket.socket, pieces: list[memoryview], *, may_end: bool = False
) -> bool:
    """Fill the pieces; False if the connection ended before the first byte, where it may."""
    # TLS gives at most a record of 16 KiB at a time, into one piece.
    is_secured = isinstance(connection, SSLSocket)
    for group in [[piece] for piece in pieces] if is_secured else [pieces]:
        left = group
        while left:
            received = _receive(connection, left)
            if not received:
                if may_end:
                    return False
                raise UnavailableError("the bulk connection ended in the middle of a frame")
            left = _after(left, received)
            may_end = False
    return True


def _receive(connection: socket.socket, pieces: list[memoryview]) -> int:
    try:
        if isinstance(connection, SSLSocket):
            return connection.recv_into(pieces[0])
        return connection.recvmsg_into(pieces[:MAX_PIECES], 0, socket.MSG_WAITALL)[0]
    except OSError as error:
        raise UnavailableError("the bulk connection broke", given=str(error)) from error


def _after(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of the pieces after so many bytes."""
    if num_bytes == sum(map(len, pieces)):
        return []
    for index, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= len(piece)
    return []
