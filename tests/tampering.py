"""A worker that may do something to what it sends, or in the middle of sending it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvferry.worker.checksum import frame_checksum, segment_checksums
from kvferry.worker.frames import Frame, Geometry, Header, Segment
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import FetchAsk

Messages = Iterator[Header | Frame]
Tamper = Callable[[WorkerService, Messages], Messages]


def make_frame(segments: tuple[Segment, ...], payload: bytes) -> Frame:
    """Return the frame of a payload, with its checksum."""
    checksum = frame_checksum(segment_checksums(segments, [payload]))
    return Frame(segments=segments, checksum=checksum, payload=payload)


class TamperingService(WorkerService):
    """Its frames leave as `tamper` returns them, whatever the path; None leaves them alone."""

    tamper: Tamper | None = None

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        parts = super().open_fetch(ask)
        return parts if self.tamper is None else as_sent(self.tamper(self, as_received(parts)))


def as_received(parts: Iterator[Header | OutgoingFrame]) -> Messages:
    """Yield each part as an honest sender's receiver would get it."""
    for part in parts:
        if isinstance(part, Header):
            yield part
            continue
        payload = b"".join(part.pieces)
        kept = part.settle()
        if kept:
            end = part.segments[kept - 1].offset + part.segments[kept - 1].length
            yield make_frame(part.segments[:kept], payload[:end])


def as_sent(messages: Messages) -> Iterator[Header | OutgoingFrame]:
    """Yield frames that leave as they are, right or wrong."""
    for message in messages:
        yield message if isinstance(message, Header) else _Copied(message)


class _Copied(OutgoingFrame):
    def __init__(self, frame: Frame) -> None:
        super().__init__(frame.segments, _Payload(frame))
        self._frame = frame

    @property
    def checksum(self) -> int:
        return self._frame.checksum

    def settle(self) -> int:
        self.is_settled = True
        return len(self.segments)


class _Payload:
    last_page_bytes = None

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self.num_found = len(frame.segments)
        self.geometry = Geometry(num_layers=1, page_bytes=1, block_tokens=1)

    def pieces(self, _: object) -> list[memoryview]:
        return [memoryview(self._frame.payload)]

    def lost_hash(self, _: int) -> None:
        return None

    def kept_checksums(self, _: object) -> list[bytes]:
        return []

    def keep_checksums(self, _: object, __: object) -> None:
        pass


def corrupted(frame: Frame) -> Frame:
    """Return the frame with another first byte, and the checksum of before."""
    return replace(frame, payload=bytes([frame.payload[0] ^ 1]) + bytes(frame.payload[1:]))
