"""A Take as a plain value, and to and from protobuf. No gRPC here."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.proto.control_codec import source_from_pb, source_to_pb
from kvferry.proto.grpc_status import decode_message
from kvferry.proto.identity import Identity, identity_to_cbor
from kvferry.proto.ids import BlockHash, GroupId, join_hashes, split_hashes
from kvferry.proto.step_messages import Source
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.transfer_wire import MAX_UNFRAMED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAsk:
    """Which blocks are to be taken from `source`; the first is the sequence's `first_block`."""

    identity_digest: bytes
    identity_cbor: bytes
    group_id: GroupId
    hashes: tuple[BlockHash, ...]
    first_block: int
    source: Source


def make_take_ask(
    identity: Identity,
    hashes: Sequence[BlockHash],
    *,
    group_id: GroupId,
    first_block: int,
    source: Source,
) -> TakeAsk:
    """Return the ask to take the blocks of `hashes` under `identity`."""
    return TakeAsk(
        identity_digest=identity.digest(),
        identity_cbor=identity_to_cbor(identity),
        group_id=group_id,
        hashes=tuple(hashes),
        first_block=first_block,
        source=source,
    )


def take_ask_to_proto(ask: TakeAsk) -> transfer_pb2.TakeRequest:
    """Return the request message.

    Raises:
        BadInputError: hashes of different sizes, or of no hash's size.
    """
    hashes, hash_bytes = join_hashes(ask.hashes)
    return transfer_pb2.TakeRequest(
        identity_digest=ask.identity_digest,
        identity_cbor=ask.identity_cbor,
        group_id=ask.group_id,
        hash_bytes=hash_bytes,
        hashes=hashes,
        first_block=ask.first_block,
        source=source_to_pb(ask.source),
    )


def decode_take(data: bytes) -> TakeAsk:
    """Return the ask in a Take request as it travels.

    Raises:
        MessageTooLargeError: more than `MAX_UNFRAMED_BYTES`.
        BadInputError: no TakeRequest, or joined hashes that are not a whole number of hashes.
        ConfigError: a layout that cannot be.
    """
    message = decode_message(transfer_pb2.TakeRequest, data, at_most=MAX_UNFRAMED_BYTES)
    return TakeAsk(
        identity_digest=message.identity_digest,
        identity_cbor=message.identity_cbor,
        group_id=GroupId(message.group_id),
        hashes=split_hashes(message.hashes, message.hash_bytes),
        first_block=message.first_block,
        source=source_from_pb(message.source),
    )
