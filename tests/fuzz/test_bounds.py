"""Small messages that name large numbers, and large ones of many small parts, cost no memory."""

from collections.abc import Callable

import cbor2
import pytest
from tests.builders import make_identity

from kvferry.proto.errors import BadInputError, KvferryError, MessageTooLargeError, TransferError
from kvferry.proto.grpc_status import error_from_status
from kvferry.proto.identity import identity_from_cbor, identity_to_plain
from kvferry.proto.ids import MAX_HASHES
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker import transfer_wire
from kvferry.worker.frame_wire import MAX_ENVELOPE_BYTES, decode_envelope
from kvferry.worker.frames import MAX_SEGMENTS, Geometry, plan_frames
from kvferry.worker.take_wire import decode_take
from kvferry.worker.transfer_wire import MAX_UNFRAMED_BYTES, decode_fetch, decode_reply

LARGE = 60 << 20


def nested(number: int, data: bytes) -> bytes:
    """Return a field of a message: its number, and what is in it."""
    length, encoded = len(data), bytearray()
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2, *encoded, length]) + data


EMPTY_RUNS = nested(9, b"\x2a\x00" * (LARGE // 2))
EMPTY_ADDRESSES = nested(7, b"\x1a\x00" * (LARGE // 2))
EMPTY_SEGMENTS = nested(2, b"\x0a\x00" * (LARGE // 2))
EMPTY_SEGMENTS_OF_A_FRAME = nested(2, b"\x0a\x00" * MAX_ENVELOPE_BYTES + nested(3, b"payload"))


@pytest.mark.parametrize(
    ("decode", "message", "error"),
    [
        (decode_fetch, EMPTY_RUNS, MessageTooLargeError),
        (decode_take, EMPTY_ADDRESSES, MessageTooLargeError),
        (decode_reply, EMPTY_SEGMENTS, TransferError),
        (decode_reply, EMPTY_SEGMENTS_OF_A_FRAME, TransferError),
        (transfer_wire.decode_store_part, EMPTY_SEGMENTS, MessageTooLargeError),
        (transfer_wire.decode_store_part, EMPTY_SEGMENTS_OF_A_FRAME, TransferError),
    ],
    ids=["runs", "addresses", "reply", "framed reply", "store", "framed store"],
)
def test_messages_of_millions_of_empty_parts_are_refused_before_any_is_made(
    decode: Callable[[bytes], object], message: bytes, error: type[KvferryError]
) -> None:
    with pytest.raises(error):
        decode(message)


def test_as_many_segments_as_a_sender_may_send_are_taken_and_no_more() -> None:
    whole = transfer_pb2.Frame()
    for index in range(MAX_SEGMENTS):
        whole.segments.add(hash_index=index, layer_end=80, offset=index << 9, length=512)
    encoded = whole.SerializeToString()
    assert len(encoded) < MAX_ENVELOPE_BYTES
    assert len(decode_envelope(encoded)[0]) == MAX_SEGMENTS
    whole.segments.add()
    with pytest.raises(TransferError, match="too many segments"):
        decode_envelope(whole.SerializeToString())
    small = Geometry(num_layers=1, page_bytes=1, block_tokens=1)
    assert [len(frame) for frame in plan_frames(MAX_SEGMENTS + 3, small)] == [MAX_SEGMENTS, 3]


def test_more_hashes_than_any_prompt_has_are_refused_by_number() -> None:
    request = transfer_pb2.FetchRequest(hash_bytes=16, hashes=bytes(16 * (MAX_HASHES + 1)))
    with pytest.raises(BadInputError, match=f"too many hashes.*given: {MAX_HASHES + 1}"):
        decode_fetch(request.SerializeToString())
    request.hashes = bytes(16 * MAX_HASHES)
    assert len(decode_fetch(request.SerializeToString()).hashes) == MAX_HASHES
    assert 32 * MAX_HASHES < MAX_UNFRAMED_BYTES


def test_an_identity_of_a_trillion_layers_is_refused_without_counting_to_it() -> None:
    plain = identity_to_plain(make_identity()) | {"num_layers": 10**12}
    with pytest.raises(KvferryError, match="every layer exactly once"):
        identity_from_cbor(cbor2.dumps(plain))


@pytest.mark.parametrize("encoded", [b"[" * 8000, b'{"a":' * 1600], ids=["lists", "maps"])
def test_brackets_within_brackets_in_an_error_leave_the_status(encoded: bytes) -> None:
    error = error_from_status("NOT_FOUND", "gone", encoded)
    assert (type(error).__name__, error.message) == ("NotFoundError", "gone")


def test_a_size_of_thousands_of_digits_in_a_status_is_only_text() -> None:
    details = f"message larger than max ({'1' * 5000} vs. 64)"
    assert error_from_status("RESOURCE_EXHAUSTED", details, None).message == details
