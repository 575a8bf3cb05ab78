"""Frames to bytes and back, with one copy of the payload at most.

Written by hand around the payload: protobuf's own serialiser takes 30 times as long for a megabyte,
because it grows its buffer while it copies, and its parser copies the payload once more.
"""

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from kvferry.proto.errors import TransferError
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.frames import MAX_SEGMENTS, Frame, Segment
from kvferry.worker.outgoing import OutgoingFrame

# Field number << 3 | wire type: 2 is a length and so many bytes, 1 is eight bytes.
_TAG_FRAME = 2 << 3 | 2
_TAG_SEGMENT = 1 << 3 | 2
_TAG_CHECKSUM = 2 << 3 | 1
_TAG_PAYLOAD = 3 << 3 | 2
_MAX_VARINT_BYTES = 10

# Room for MAX_SEGMENTS segments. Protobuf takes two dozen bytes of memory for one of an envelope.
MAX_ENVELOPE_BYTES = 2 << 20


def encode_frame(
    segments: Sequence[Segment], checksum: int, pieces: Sequence[bytes | memoryview]
) -> bytes:
    """Return a FetchReply or a StoreRequest that holds the frame (field 2 of both)."""
    payload_bytes = sum(map(len, pieces))
    inner = encode_envelope(segments, checksum)
    inner += bytes([_TAG_PAYLOAD]) + _varint(payload_bytes)
    frame = bytes([_TAG_FRAME]) + _varint(len(inner) + payload_bytes)
    return b"".join((frame, inner, *pieces))


def encode_settled(frame: OutgoingFrame) -> bytes | None:
    """Return the message of what still holds of a frame once it is copied, and settle it."""
    message = encode_frame(frame.segments, frame.checksum, frame.pieces)
    kept = frame.settle()
    if kept == len(frame.segments):
        return message
    return encode_settled(frame.first(kept)) if kept else None


def decode_frame(message: bytes) -> Frame | None:
    """Return the frame in a message as `encode_frame` writes it, its payload not copied.

    None for every other message, whether it holds a frame written in another order or no frame.

    Raises:
        TransferError: as `decode_envelope`.
    """
    try:
        if message[0] != _TAG_FRAME:
            return None
        length, begin = _read_varint(message, 1)
        if begin + length != len(message):
            return None
        payload_at = _find_payload(message, begin)
        length, payload = _read_varint(message, payload_at + 1)
        if payload + length != len(message):
            return None
        segments, checksum = decode_envelope(message[begin:payload_at])
    except (IndexError, DecodeError):
        return None
    return Frame(segments=segments, checksum=checksum, payload=memoryview(message)[payload:])


def encode_envelope(segments: Iterable[Segment], checksum: int = 0) -> bytes:
    """Return a protobuf Frame without its payload."""
    envelope = transfer_pb2.Frame(checksum=checksum)
    for segment in segments:
        envelope.segments.add(
            hash_index=segment.hash_index,
            layer_start=segment.layer_start,
            layer_end=segment.layer_end,
            offset=segment.offset,
            length=segment.length,
        )
    return envelope.SerializeToString()


def decode_envelope(data: bytes) -> tuple[tuple[Segment, ...], int]:
    """Return the segments and the checksum.

    Raises:
        google.protobuf.message.DecodeError: no protobuf Frame.
        TransferError: more than `MAX_ENVELOPE_BYTES`, or than `MAX_SEGMENTS`.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise TransferError(
            "the envelope of a frame is too large",
            given=len(data),
            allowed=f"at most {MAX_ENVELOPE_BYTES} bytes",
        )
    message = transfer_pb2.Frame.FromString(data)
    return segments_from_proto(message), message.checksum


def segments_from_proto(message: transfer_pb2.Frame) -> tuple[Segment, ...]:
    """Return the segments of a frame.

    Raises:
        TransferError: more than `MAX_SEGMENTS`.
    """
    if len(message.segments) > MAX_SEGMENTS:
        raise TransferError(
            "a frame of too many segments",
            given=len(message.segments),
            allowed=f"at most {MAX_SEGMENTS}",
        )
    return tuple(
        Segment(
            hash_index=segment.hash_index,
            layer_start=segment.layer_start,
            layer_end=segment.layer_end,
            offset=segment.offset,
            length=segment.length,
        )
        for segment in message.segments
    )


def _find_payload(message: bytes, position: int) -> int:
    """Return where the payload's tag stands; IndexError if other fields come before it, or many."""
    for _ in range(MAX_SEGMENTS + 2):
        tag = message[position]
        if tag == _TAG_PAYLOAD:
            return position
        if tag == _TAG_CHECKSUM:
            position += 9
        elif tag == _TAG_SEGMENT:
            length, begin = _read_varint(message, position + 1)
            position = begin + length
        else:
            break
    raise IndexError("another field, or too many")


def _varint(value: int) -> bytes:
    """Return protobuf's encoding of a length: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a length and the position after it; IndexError when there is none."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = message[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise IndexError("a varint of more than ten bytes")
