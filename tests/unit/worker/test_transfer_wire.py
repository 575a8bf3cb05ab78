from dataclasses import replace

import pytest
from tests.builders import make_identity

from kvferry.proto.errors import BadInputError, TransferError
from kvferry.proto.identity import identity_from_cbor
from kvferry.proto.ids import BlockHash, BlockId, GroupId
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker import selection_wire
from kvferry.worker.frame_wire import decode_frame, encode_frame
from kvferry.worker.frames import BulkOffer, Frame, Geometry, Header, Segment, SharedOffer
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    decode_reply,
    decode_store_part,
    encode_header,
    encode_store_header,
    fetch_ask_from_proto,
    fetch_ask_to_proto,
    make_fetch_ask,
    make_store_ask,
)

GEOMETRY = Geometry(num_layers=3, page_bytes=100, block_tokens=16)
IDENTITY = make_identity(head_size=2)
HASHES = [BlockHash(bytes([i]) * 32) for i in range(3)]


def frame(num_bytes: int) -> Frame:
    segment = Segment(hash_index=5, layer_start=1, layer_end=3, offset=0, length=num_bytes)
    return Frame(segments=(segment, segment), checksum=2**64 - 1, payload=b"p" * num_bytes)


def encoded(sent: Frame) -> bytes:
    return encode_frame(sent.segments, sent.checksum, [sent.payload])


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 16_383, 16_384, 1 << 20, (2 << 20) + 1])
def test_a_frame_is_encoded_as_protobuf_would(num_bytes: int) -> None:
    sent = frame(num_bytes)
    for kind in (transfer_pb2.FetchReply, transfer_pb2.StoreRequest):
        message = kind.FromString(encoded(sent))
        assert message.WhichOneof("part") == "frame"
        assert message.SerializeToString() == encoded(sent)
    assert decode_reply(encoded(sent)) == sent
    assert decode_store_part(encoded(sent)) == sent


def test_a_payload_is_joined_from_its_pieces_and_read_where_it_stands() -> None:
    sent = frame(1000)
    pieces = [memoryview(sent.payload)[:300], memoryview(sent.payload)[300:]]
    message = encode_frame(sent.segments, sent.checksum, pieces)
    assert message == encoded(sent)
    found = decode_reply(message)
    assert isinstance(found, Frame)
    assert isinstance(found.payload, memoryview)
    assert found.payload.obj is message


def test_a_frame_whose_fields_come_in_another_order_is_understood() -> None:
    sent = frame(1000)
    whole = transfer_pb2.FetchReply.FromString(encoded(sent)).frame
    payload_first = (
        transfer_pb2.Frame(payload=whole.payload).SerializeToString()
        + transfer_pb2.Frame(segments=whole.segments, checksum=whole.checksum).SerializeToString()
    )
    length = bytes([len(payload_first) & 0x7F | 0x80, len(payload_first) >> 7])
    assert decode_frame(b"\x12" + length + payload_first) is None
    assert decode_reply(b"\x12" + length + payload_first) == sent


@pytest.mark.parametrize("cut", [1, 2, 3, 20, 1000])
def test_a_frame_that_is_cut_off_is_refused(cut: int) -> None:
    message = encoded(frame(1000))
    with pytest.raises(TransferError, match=f"not a message of a transfer; given: {cut} bytes"):
        decode_reply(message[:cut])
    with pytest.raises(BadInputError, match=f"not a StoreRequest; given: {cut} bytes"):
        decode_store_part(message[:cut])


SHARED = SharedOffer(
    socket="door", block_ids=(BlockId(7), BlockId(300)), generations=(1, 2**64 - 1)
)


@pytest.mark.parametrize("offer", [None, SHARED, BulkOffer(port=65535, ticket=b"t" * 16)])
def test_a_header_survives_the_wire(offer: SharedOffer | BulkOffer | None) -> None:
    header = Header(incarnation=2**63, num_found=7, geometry=GEOMETRY, offer=offer)
    assert decode_reply(encode_header(header)) == header


@pytest.mark.parametrize("hashes", [HASHES, [BlockHash(b"x" * 16)], []])
def test_asks_survive_the_wire(hashes: list[BlockHash]) -> None:
    fetch = make_fetch_ask(
        IDENTITY, hashes, group_id=GroupId(4), lease_id="l", incarnation=9, max_frame_bytes=77
    )
    fetch = replace(fetch, paths=("bulk",), place="here")
    message = transfer_pb2.FetchRequest.FromString(fetch_ask_to_proto(fetch).SerializeToString())
    assert fetch_ask_from_proto(message) == fetch
    store = make_store_ask(IDENTITY, hashes, GEOMETRY, group_id=GroupId(4))
    assert decode_store_part(encode_store_header(store)) == store


def test_hashes_of_mixed_or_unknown_sizes_are_refused_with_the_sizes() -> None:
    ask = make_fetch_ask(IDENTITY, HASHES)
    for hashes in ((HASHES[0], BlockHash(b"x" * 16)), (BlockHash(b"x" * 20),)):
        with pytest.raises(BadInputError, match=r"must all have one size in bytes; given: \["):
            fetch_ask_to_proto(replace(ask, hashes=hashes))


@pytest.mark.parametrize(("hash_bytes", "num_bytes"), [(0, 0), (32, 33), (20, 40)])
def test_joined_hashes_that_cannot_be_split_are_refused(hash_bytes: int, num_bytes: int) -> None:
    message = transfer_pb2.FetchRequest(hash_bytes=hash_bytes, hashes=bytes(num_bytes))
    with pytest.raises(BadInputError, match=f"hash_bytes={hash_bytes}, hashes_bytes={num_bytes}"):
        fetch_ask_from_proto(message)


def test_an_empty_message_in_a_transfer_is_refused() -> None:
    with pytest.raises(TransferError, match="empty message"):
        decode_reply(b"")
    with pytest.raises(TransferError, match="empty message"):
        decode_store_part(b"")


def test_asks_name_the_identity_by_digest_and_in_full() -> None:
    asks: list[FetchAsk | StoreAsk] = [
        make_fetch_ask(IDENTITY, HASHES),
        make_store_ask(IDENTITY, HASHES, GEOMETRY),
    ]
    for ask in asks:
        assert ask.identity_digest == IDENTITY.digest()
        assert identity_from_cbor(ask.identity_cbor) == IDENTITY


def test_a_selection_of_too_many_runs_is_refused_before_anything_is_made_of_them() -> None:
    message = transfer_pb2.Selection(layer_end=1, head_end=1)
    for _ in range(selection_wire.MAX_RUNS):
        message.runs.add(first=0, run_tokens=1)
    assert len(selection_wire.selection_from_proto(message).runs) == selection_wire.MAX_RUNS
    message.runs.add(first=0, run_tokens=1)
    with pytest.raises(BadInputError, match="too many runs; given: 65537; allowed: at most 65536"):
        selection_wire.selection_from_proto(message)
