from dataclasses import replace

import pytest
from tests.builders import make_identity

from kvferry.proto.errors import BadInputError, TransferError
from kvferry.proto.identity import identity_from_cbor
from kvferry.proto.ids import BlockHash, GroupId
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker import selection_wire
from kvferry.worker.frames import Frame, Geometry, Header, Segment
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    encode_reply,
    encode_store_part,
    fetch_ask_from_proto,
    fetch_ask_to_proto,
    make_fetch_ask,
    make_store_ask,
    reply_from_proto,
    store_part_from_proto,
)

GEOMETRY = Geometry(num_layers=3, page_bytes=100, block_tokens=16)
IDENTITY = make_identity(head_size=2)
HASHES = [BlockHash(bytes([i]) * 32) for i in range(3)]


def frame(num_bytes: int) -> Frame:
    segment = Segment(hash_index=5, layer_start=1, layer_end=3, offset=0, length=num_bytes)
    return Frame(segments=(segment, segment), checksum=2**64 - 1, payload=b"p" * num_bytes)


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 16_383, 16_384, 1 << 20, (2 << 20) + 1])
def test_a_frame_is_encoded_as_protobuf_would(num_bytes: int) -> None:
    sent = frame(num_bytes)
    encoded = encode_reply(sent)
    message = transfer_pb2.FetchReply.FromString(encoded)
    assert message.WhichOneof("part") == "frame"
    assert reply_from_proto(message) == sent
    assert message.SerializeToString() == encoded
    assert encode_store_part(sent) == encoded
    assert store_part_from_proto(transfer_pb2.StoreRequest.FromString(encoded)) == sent


def test_a_header_survives_the_wire() -> None:
    header = Header(incarnation=2**63, num_found=7, geometry=GEOMETRY)
    message = transfer_pb2.FetchReply.FromString(encode_reply(header))
    assert reply_from_proto(message) == header


@pytest.mark.parametrize("hashes", [HASHES, [BlockHash(b"x" * 16)], []])
def test_asks_survive_the_wire(hashes: list[BlockHash]) -> None:
    fetch = make_fetch_ask(
        IDENTITY, hashes, group_id=GroupId(4), lease_id="l", incarnation=9, max_frame_bytes=77
    )
    message = transfer_pb2.FetchRequest.FromString(fetch_ask_to_proto(fetch).SerializeToString())
    assert fetch_ask_from_proto(message) == fetch
    store = make_store_ask(IDENTITY, hashes, GEOMETRY, group_id=GroupId(4))
    encoded = encode_store_part(store)
    assert store_part_from_proto(transfer_pb2.StoreRequest.FromString(encoded)) == store


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
        reply_from_proto(transfer_pb2.FetchReply())
    with pytest.raises(TransferError, match="empty message"):
        store_part_from_proto(transfer_pb2.StoreRequest())


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
