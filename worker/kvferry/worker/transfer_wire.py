"""Transfer messages as plain values, and to and from protobuf. No gRPC here."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.proto.errors import TransferError
from kvferry.proto.identity import Identity, identity_from_cbor, identity_to_cbor
from kvferry.proto.ids import FIRST_GROUP, BlockHash, GroupId, join_hashes, split_hashes
from kvferry.proto.layout import Layout
from kvferry.proto.layout_text import layout_text, parse_layout
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.frames import Frame, Geometry, Header, Segment
from kvferry.worker.selection import Selection
from kvferry.worker.selection_wire import selection_from_proto, selection_to_proto

# Field number << 3 | 2 (a length follows).
_TAG_FRAME = bytes([2 << 3 | 2])
_TAG_PAYLOAD = bytes([3 << 3 | 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchAsk:
    """Which blocks are wanted. `incarnation` 0 means any; `max_frame_bytes` 0 the worker's own.

    `selection` is the part of them that is wanted, None for all of each. `layout` is how the caller
    takes the worker's instance to be laid out, None for one rank; `rank` which of them it asks.
    """

    identity_digest: bytes
    identity_cbor: bytes
    group_id: GroupId
    hashes: tuple[BlockHash, ...]
    lease_id: str = ""
    incarnation: int = 0
    max_frame_bytes: int = 0
    selection: Selection | None = None
    layout: Layout | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAsk:
    """Which blocks are about to be sent, and how their bytes are cut."""

    identity_digest: bytes
    identity_cbor: bytes
    group_id: GroupId
    hashes: tuple[BlockHash, ...]
    geometry: Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """One worker as it describes itself; `geometry_of_group` has every group it serves."""

    incarnation: int
    identity: Identity
    geometry_of_group: dict[GroupId, Geometry]
    num_resident_blocks: int
    pid: int


def make_fetch_ask(
    identity: Identity,
    hashes: Sequence[BlockHash],
    *,
    group_id: GroupId = FIRST_GROUP,
    lease_id: str = "",
    incarnation: int = 0,
    max_frame_bytes: int = 0,
    selection: Selection | None = None,
    layout: Layout | None = None,
    rank: int = 0,
) -> FetchAsk:
    """Return the ask for the blocks of `hashes` under `identity`, or for a part of them."""
    return FetchAsk(
        identity_digest=identity.digest(),
        identity_cbor=identity_to_cbor(identity),
        group_id=group_id,
        hashes=tuple(hashes),
        lease_id=lease_id,
        incarnation=incarnation,
        max_frame_bytes=max_frame_bytes,
        selection=selection,
        layout=layout,
        rank=rank,
    )


def make_store_ask(
    identity: Identity,
    hashes: Sequence[BlockHash],
    geometry: Geometry,
    *,
    group_id: GroupId = FIRST_GROUP,
) -> StoreAsk:
    """Return the announcement of the blocks of `hashes` under `identity`."""
    return StoreAsk(
        identity_digest=identity.digest(),
        identity_cbor=identity_to_cbor(identity),
        group_id=group_id,
        hashes=tuple(hashes),
        geometry=geometry,
    )


def fetch_ask_to_proto(ask: FetchAsk) -> transfer_pb2.FetchRequest:
    """Return the request message.

    Raises:
        BadInputError: hashes of different sizes, or of no hash's size.
    """
    hashes, hash_bytes = join_hashes(ask.hashes)
    return transfer_pb2.FetchRequest(
        identity_digest=ask.identity_digest,
        identity_cbor=ask.identity_cbor,
        group_id=ask.group_id,
        hash_bytes=hash_bytes,
        hashes=hashes,
        lease_id=ask.lease_id,
        incarnation=ask.incarnation,
        max_frame_bytes=ask.max_frame_bytes,
        selection=None if ask.selection is None else selection_to_proto(ask.selection),
        layout="" if ask.layout is None else layout_text(ask.layout),
        rank=ask.rank,
    )


def fetch_ask_from_proto(message: transfer_pb2.FetchRequest) -> FetchAsk:
    """Return the request's values.

    Raises:
        BadInputError: the joined hashes are not a whole number of hashes.
        ConfigError: a layout that cannot be.
    """
    return FetchAsk(
        identity_digest=message.identity_digest,
        identity_cbor=message.identity_cbor,
        group_id=GroupId(message.group_id),
        hashes=split_hashes(message.hashes, message.hash_bytes),
        lease_id=message.lease_id,
        incarnation=message.incarnation,
        max_frame_bytes=message.max_frame_bytes,
        selection=(
            selection_from_proto(message.selection) if message.HasField("selection") else None
        ),
        layout=parse_layout(message.layout) if message.layout else None,
        rank=message.rank,
    )


def encode_reply(part: Header | Frame) -> bytes:
    """Return one reply of a Fetch as it travels."""
    if isinstance(part, Frame):
        return _encode_frame(part)
    reply = transfer_pb2.FetchReply()
    reply.header.incarnation = part.incarnation
    reply.header.num_found = part.num_found
    _fill_geometry(reply.header.geometry, part.geometry)
    return reply.SerializeToString()


def reply_from_proto(message: transfer_pb2.FetchReply) -> Header | Frame:
    """Return one reply of a Fetch.

    Raises:
        TransferError: neither a header nor a frame.
        ConfigError: a geometry that cannot be.
    """
    which = message.WhichOneof("part")
    if which == "frame":
        return _frame_from_proto(message.frame)
    if which == "header":
        return Header(
            incarnation=message.header.incarnation,
            num_found=message.header.num_found,
            geometry=_geometry_from_proto(message.header.geometry),
        )
    raise TransferError("an empty message in a transfer", allowed="a header or a frame")


def encode_store_part(part: StoreAsk | Frame) -> bytes:
    """Return one request of a Store as it travels.

    Raises:
        BadInputError: hashes of different sizes, or of no hash's size.
    """
    if isinstance(part, Frame):
        return _encode_frame(part)
    request = transfer_pb2.StoreRequest()
    header = request.header
    header.identity_digest = part.identity_digest
    header.identity_cbor = part.identity_cbor
    header.group_id = part.group_id
    header.hashes, header.hash_bytes = join_hashes(part.hashes)
    _fill_geometry(header.geometry, part.geometry)
    return request.SerializeToString()


def store_part_from_proto(message: transfer_pb2.StoreRequest) -> StoreAsk | Frame:
    """Return one request of a Store.

    Raises:
        TransferError: neither a header nor a frame.
        BadInputError: a malformed header.
    """
    which = message.WhichOneof("part")
    if which == "frame":
        return _frame_from_proto(message.frame)
    if which == "header":
        header = message.header
        return StoreAsk(
            identity_digest=header.identity_digest,
            identity_cbor=header.identity_cbor,
            group_id=GroupId(header.group_id),
            hashes=split_hashes(header.hashes, header.hash_bytes),
            geometry=_geometry_from_proto(header.geometry),
        )
    raise TransferError("an empty message in a transfer", allowed="a header or a frame")


def description_to_proto(description: WorkerDescription) -> transfer_pb2.DescribeReply:
    """Return the reply of a Describe."""
    reply = transfer_pb2.DescribeReply(
        incarnation=description.incarnation,
        identity_cbor=identity_to_cbor(description.identity),
        num_resident_blocks=description.num_resident_blocks,
        pid=description.pid,
    )
    for group_id, geometry in description.geometry_of_group.items():
        _fill_geometry(reply.groups.add(group_id=group_id).geometry, geometry)
    return reply


def description_from_proto(message: transfer_pb2.DescribeReply) -> WorkerDescription:
    """Return the values of a Describe's reply.

    Raises:
        BadInputError: an identity or a geometry that cannot be.
    """
    return WorkerDescription(
        incarnation=message.incarnation,
        identity=identity_from_cbor(message.identity_cbor),
        geometry_of_group={
            GroupId(group.group_id): _geometry_from_proto(group.geometry)
            for group in message.groups
        },
        num_resident_blocks=message.num_resident_blocks,
        pid=message.pid,
    )


def _fill_geometry(message: transfer_pb2.Geometry, geometry: Geometry) -> None:
    message.num_layers = geometry.num_layers
    message.page_bytes = geometry.page_bytes
    message.block_tokens = geometry.block_tokens


def _geometry_from_proto(message: transfer_pb2.Geometry) -> Geometry:
    return Geometry(
        num_layers=message.num_layers,
        page_bytes=message.page_bytes,
        block_tokens=message.block_tokens,
    )


def _encode_frame(frame: Frame) -> bytes:
    """Return a FetchReply or a StoreRequest that holds the frame (field 2 of both).

    Written by hand around the payload: protobuf's own serialiser takes 30 times as long for
    a megabyte, because it grows its buffer while it copies.
    """
    envelope = transfer_pb2.Frame(xxh3_64=frame.checksum)
    for segment in frame.segments:
        envelope.segments.add(
            hash_index=segment.hash_index,
            layer_start=segment.layer_start,
            layer_end=segment.layer_end,
            offset=segment.offset,
            length=segment.length,
        )
    inner = envelope.SerializeToString() + _TAG_PAYLOAD + _varint(len(frame.payload))
    return b"".join((_TAG_FRAME, _varint(len(inner) + len(frame.payload)), inner, frame.payload))


def _varint(value: int) -> bytes:
    """Return protobuf's encoding of a length: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _frame_from_proto(message: transfer_pb2.Frame) -> Frame:
    segments = tuple(
        Segment(
            hash_index=segment.hash_index,
            layer_start=segment.layer_start,
            layer_end=segment.layer_end,
            offset=segment.offset,
            length=segment.length,
        )
        for segment in message.segments
    )
    return Frame(segments=segments, checksum=message.xxh3_64, payload=message.payload)
