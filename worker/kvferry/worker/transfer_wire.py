"""Transfer messages as plain values, and to and from protobuf. No gRPC here."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.proto.errors import BadInputError, TransferError
from kvferry.proto.grpc_status import decode_message
from kvferry.proto.identity import Identity, identity_from_cbor, identity_to_cbor
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, GroupId, join_hashes, split_hashes
from kvferry.proto.layout import Layout
from kvferry.proto.layout_text import layout_text, parse_layout
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.frame_wire import decode_frame, segments_from_proto
from kvferry.worker.frames import BulkOffer, Frame, Geometry, Header, SharedOffer
from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.selection import Selection
from kvferry.worker.selection_wire import selection_from_proto, selection_to_proto

MAX_PORT = (1 << 16) - 1

# Of every message but a frame with its fields in order. Room for all hashes and runs that a request
# may have; more would only be room for parts of two bytes that protobuf makes fifty of.
MAX_UNFRAMED_BYTES = 16 << 20

_PATH_TO_PROTO: dict[Path, transfer_pb2.Path.ValueType] = {
    "shm": transfer_pb2.PATH_SHARED_MEMORY,
    "bulk": transfer_pb2.PATH_BULK_SOCKET,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchAsk:
    """Which blocks are wanted. `incarnation` 0 means any; `max_frame_bytes` 0 the worker's own.

    `selection` is the part of them that is wanted, None for all of each. `layout` is how the caller
    takes the worker's instance to be laid out, None for one rank; `rank` which of them it asks.
    `paths` are those it can take besides gRPC, `place` is its `paths.this_place`.
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
    paths: tuple[Path, ...] = ()
    place: str = ""


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
        paths=[_PATH_TO_PROTO[path] for path in ask.paths],
        place=ask.place,
    )


def decode_fetch(data: bytes) -> FetchAsk:
    """Return the ask in a Fetch request as it travels.

    Raises:
        MessageTooLargeError: more than `MAX_UNFRAMED_BYTES`.
        BadInputError: no FetchRequest, or as `fetch_ask_from_proto`.
    """
    message = decode_message(transfer_pb2.FetchRequest, data, at_most=MAX_UNFRAMED_BYTES)
    return fetch_ask_from_proto(message)


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
        # A path of a later version is none that we could take.
        paths=tuple(path for path in ALL_PATHS if _PATH_TO_PROTO[path] in message.paths),
        place=message.place,
    )


def encode_header(header: Header) -> bytes:
    """Return the first reply of a Fetch as it travels."""
    reply = transfer_pb2.FetchReply()
    message = reply.header
    message.incarnation = header.incarnation
    message.num_found = header.num_found
    _fill_geometry(message.geometry, header.geometry)
    if isinstance(header.offer, SharedOffer):
        message.shared_memory.socket = header.offer.socket
        message.shared_memory.block_ids.extend(header.offer.block_ids)
        message.shared_memory.generations.extend(header.offer.generations)
    elif header.offer is not None:
        message.bulk.port = header.offer.port
        message.bulk.ticket = header.offer.ticket
    return reply.SerializeToString()


def decode_reply(data: bytes) -> Header | Frame:
    """Return one reply of a Fetch.

    Raises:
        TransferError: neither a header nor a frame, or one with too many parts.
        ConfigError: a geometry that cannot be.
    """
    frame = decode_frame(data)
    if frame is not None:
        return frame
    try:
        message = decode_message(transfer_pb2.FetchReply, data, at_most=MAX_UNFRAMED_BYTES)
    except BadInputError as error:
        raise TransferError("not a message of a transfer", given=f"{len(data)} bytes") from error
    if message.HasField("frame"):
        return _frame_from_proto(message.frame)
    if message.HasField("header"):
        return Header(
            incarnation=message.header.incarnation,
            num_found=message.header.num_found,
            geometry=_geometry_from_proto(message.header.geometry),
            offer=_offer_from_proto(message.header),
        )
    raise TransferError("an empty message in a transfer", allowed="a header or a frame")


def encode_store_header(ask: StoreAsk) -> bytes:
    """Return the first request of a Store as it travels.

    Raises:
        BadInputError: hashes of different sizes, or of no hash's size.
    """
    request = transfer_pb2.StoreRequest()
    header = request.header
    header.identity_digest = ask.identity_digest
    header.identity_cbor = ask.identity_cbor
    header.group_id = ask.group_id
    header.hashes, header.hash_bytes = join_hashes(ask.hashes)
    _fill_geometry(header.geometry, ask.geometry)
    return request.SerializeToString()


def decode_store_part(data: bytes) -> StoreAsk | Frame:
    """Return one request of a Store.

    Raises:
        TransferError: neither a header nor a frame, or one with too many parts.
        MessageTooLargeError: more than `MAX_UNFRAMED_BYTES`, and no frame with its fields in order.
        BadInputError: no message, or a malformed header.
    """
    frame = decode_frame(data)
    if frame is not None:
        return frame
    message = decode_message(transfer_pb2.StoreRequest, data, at_most=MAX_UNFRAMED_BYTES)
    if message.HasField("frame"):
        return _frame_from_proto(message.frame)
    if message.HasField("header"):
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


def _offer_from_proto(header: transfer_pb2.FetchHeader) -> SharedOffer | BulkOffer | None:
    if header.HasField("shared_memory"):
        shared = header.shared_memory
        return SharedOffer(
            socket=shared.socket,
            block_ids=tuple(map(BlockId, shared.block_ids)),
            generations=tuple(shared.generations),
        )
    if header.HasField("bulk"):
        port = header.bulk.port
        if not 0 < port <= MAX_PORT:
            raise TransferError("a bulk offer of no port", given=port, allowed=f"1 to {MAX_PORT}")
        return BulkOffer(port=port, ticket=header.bulk.ticket)
    return None


def _frame_from_proto(message: transfer_pb2.Frame) -> Frame:
    return Frame(
        segments=segments_from_proto(message), checksum=message.checksum, payload=message.payload
    )
