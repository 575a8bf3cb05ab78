"""Translates commands and replies to the protobuf messages of `v1/control.proto` and back.

Every `x_to_pb` has its `x_from_pb`, and the one undoes the other exactly. Protobuf checks the kinds
of fields; what it cannot know (the size of a hash, the names of roles) is checked here, so that
both the front and the client refuse a malformed message by name. Imported by both.
"""

from collections.abc import Sequence
from typing import Literal, cast, get_args

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import (
    BlockHash,
    Epoch,
    Incarnation,
    InstanceId,
    LeaseId,
    join_hashes,
    split_hashes,
)
from kvferry.proto.layout_text import layout_text, parse_layout
from kvferry.proto.messages import (
    AcquireLease,
    Done,
    Forgotten,
    Holder,
    InstanceState,
    Leased,
    Locate,
    Located,
    ReleaseLease,
    RenewLease,
    ResetIdentity,
    Role,
)
from kvferry.proto.scheme import Algorithm, HashScheme, KeyFormat
from kvferry.proto.step_messages import Source
from kvferry.proto.v1 import control_pb2 as pb

DIGEST_BYTES = 32


# --- parts ---------------------------------------------------------------------------------------


def hashes_to_pb(hashes: Sequence[BlockHash]) -> pb.Hashes:
    """Join hashes, all of one size, into one field.

    Raises:
        BadInputError: as `join_hashes`.
    """
    data, hash_bytes = join_hashes(hashes)
    return pb.Hashes(data=data, hash_bytes=hash_bytes)


def hashes_from_pb(message: pb.Hashes) -> tuple[BlockHash, ...]:
    """Cut the joined field back into hashes; a field without any need not say their size.

    Raises:
        BadInputError: as `split_hashes`.
    """
    return split_hashes(message.data, message.hash_bytes) if message.data else ()


def scheme_to_pb(scheme: HashScheme) -> pb.Scheme:
    """Translate a hash scheme."""
    return pb.Scheme(
        algorithm=scheme.algorithm,
        key_format=scheme.key_format,
        hash_block_tokens=scheme.hash_block_tokens,
        none_hash=scheme.none_hash,
    )


def scheme_from_pb(message: pb.Scheme) -> HashScheme:
    """Translate a hash scheme back.

    Raises:
        ConfigError: an algorithm or key format this version does not know, no block size, or a root
            that is no hash of the algorithm.
    """
    # HashScheme checks everything itself.
    return HashScheme(
        algorithm=cast("Algorithm", message.algorithm),
        key_format=cast("KeyFormat", message.key_format),
        hash_block_tokens=message.hash_block_tokens,
        none_hash=message.none_hash,
    )


def source_to_pb(source: Source) -> pb.Source:
    """Translate an instance's life, and where its ranks are."""
    return pb.Source(
        instance_id=source.instance_id,
        incarnation=source.incarnation,
        layout=layout_text(source.layout),
        rank_addresses=source.rank_addresses,
    )


def source_from_pb(message: pb.Source) -> Source:
    """Translate an instance's life, and where its ranks are, back.

    Raises:
        ConfigError: a layout that this version does not know.
    """
    return Source(
        instance_id=InstanceId(message.instance_id),
        incarnation=Incarnation(message.incarnation),
        layout=parse_layout(message.layout),
        rank_addresses=tuple(message.rank_addresses),
    )


def role_from_pb(text: str) -> Role:
    """Return the role.

    Raises:
        BadInputError: one this version does not know.
    """
    if text not in get_args(Role):
        raise BadInputError("unknown role", given=text, allowed=list(get_args(Role)))
    return cast("Role", text)


def state_from_pb(text: str) -> InstanceState:
    """Return the state of an instance.

    Raises:
        BadInputError: one this version does not know.
    """
    if text not in get_args(InstanceState):
        raise BadInputError("unknown state", given=text, allowed=list(get_args(InstanceState)))
    return cast("InstanceState", text)


def _digest_from_pb(data: bytes) -> bytes:
    if len(data) != DIGEST_BYTES:
        raise BadInputError(
            "identity_digest has the wrong size", given=len(data), allowed=DIGEST_BYTES
        )
    return data


def _name_from_pb(text: str, field: Literal["call_id", "lease_id"]) -> str:
    if not text:
        raise BadInputError(f"{field} is missing", given=text, allowed="a text that is not empty")
    return text


# --- commands ------------------------------------------------------------------------------------


def locate_to_pb(command: Locate) -> pb.LocateRequest:
    """Translate `Locate`; errors as `hashes_to_pb`."""
    return pb.LocateRequest(
        identity_digest=command.identity_digest, hashes=hashes_to_pb(command.hashes)
    )


def locate_from_pb(message: pb.LocateRequest) -> Locate:
    """Translate `Locate` back.

    Raises:
        BadInputError: digest or hashes are malformed.
    """
    return Locate(
        identity_digest=_digest_from_pb(message.identity_digest),
        hashes=hashes_from_pb(message.hashes),
    )


def acquire_lease_to_pb(command: AcquireLease) -> pb.AcquireLeaseRequest:
    """Translate `AcquireLease`; errors as `hashes_to_pb`."""
    return pb.AcquireLeaseRequest(
        call_id=command.call_id,
        identity_digest=command.identity_digest,
        hashes=hashes_to_pb(command.hashes),
        ttl_s=command.ttl_s,
        instance_id=command.instance_id,
    )


def acquire_lease_from_pb(message: pb.AcquireLeaseRequest) -> AcquireLease:
    """Translate `AcquireLease` back.

    Raises:
        BadInputError: call id, digest or hashes are malformed.
    """
    has_instance = message.HasField("instance_id")
    return AcquireLease(
        call_id=_name_from_pb(message.call_id, "call_id"),
        identity_digest=_digest_from_pb(message.identity_digest),
        hashes=hashes_from_pb(message.hashes),
        ttl_s=message.ttl_s,
        instance_id=InstanceId(message.instance_id) if has_instance else None,
    )


def renew_lease_to_pb(command: RenewLease) -> pb.RenewLeaseRequest:
    """Translate `RenewLease`."""
    return pb.RenewLeaseRequest(
        call_id=command.call_id, lease_id=command.lease_id, ttl_s=command.ttl_s
    )


def renew_lease_from_pb(message: pb.RenewLeaseRequest) -> RenewLease:
    """Translate `RenewLease` back.

    Raises:
        BadInputError: call id or lease id is missing.
    """
    return RenewLease(
        call_id=_name_from_pb(message.call_id, "call_id"),
        lease_id=LeaseId(_name_from_pb(message.lease_id, "lease_id")),
        ttl_s=message.ttl_s,
    )


def release_lease_to_pb(command: ReleaseLease) -> pb.ReleaseLeaseRequest:
    """Translate `ReleaseLease`."""
    return pb.ReleaseLeaseRequest(call_id=command.call_id, lease_id=command.lease_id)


def release_lease_from_pb(message: pb.ReleaseLeaseRequest) -> ReleaseLease:
    """Translate `ReleaseLease` back.

    Raises:
        BadInputError: call id or lease id is missing.
    """
    return ReleaseLease(
        call_id=_name_from_pb(message.call_id, "call_id"),
        lease_id=LeaseId(_name_from_pb(message.lease_id, "lease_id")),
    )


def reset_to_pb(command: ResetIdentity) -> pb.ResetRequest:
    """Translate `ResetIdentity`."""
    return pb.ResetRequest(call_id=command.call_id, identity_digest=command.identity_digest)


def reset_from_pb(message: pb.ResetRequest) -> ResetIdentity:
    """Translate `ResetIdentity` back.

    Raises:
        BadInputError: call id or digest are malformed.
    """
    return ResetIdentity(
        call_id=_name_from_pb(message.call_id, "call_id"),
        identity_digest=_digest_from_pb(message.identity_digest),
    )


# --- replies -------------------------------------------------------------------------------------


def located_to_pb(reply: Located) -> pb.LocateReply:
    """Translate `Located`."""
    holders = [
        pb.Holder(
            source=source_to_pb(holder.source),
            role=holder.role,
            num_hashes=holder.num_hashes,
            num_requests=holder.num_requests,
            num_free_blocks=holder.num_free_blocks,
        )
        for holder in reply.holders
    ]
    return pb.LocateReply(epoch=reply.epoch, holders=holders, avoid=reply.avoid)


def located_from_pb(message: pb.LocateReply) -> Located:
    """Translate `Located` back.

    Raises:
        BadInputError: a role this version does not know.
    """
    holders = tuple(
        Holder(
            source=source_from_pb(holder.source),
            role=role_from_pb(holder.role),
            num_hashes=holder.num_hashes,
            num_requests=holder.num_requests,
            num_free_blocks=holder.num_free_blocks,
        )
        for holder in message.holders
    )
    avoid = tuple(InstanceId(name) for name in message.avoid)
    return Located(epoch=Epoch(message.epoch), holders=holders, avoid=avoid)


def leased_to_pb(reply: Leased) -> pb.LeaseReply:
    """Translate `Leased`."""
    return pb.LeaseReply(
        lease_id=reply.lease_id,
        source=None if reply.source is None else source_to_pb(reply.source),
        num_hashes=reply.num_hashes,
        ttl_s=reply.ttl_s,
    )


def leased_from_pb(message: pb.LeaseReply) -> Leased:
    """Translate `Leased` back."""
    return Leased(
        lease_id=LeaseId(message.lease_id) if message.HasField("lease_id") else None,
        source=source_from_pb(message.source) if message.HasField("source") else None,
        num_hashes=message.num_hashes,
        ttl_s=message.ttl_s,
    )


def done_to_pb(reply: Done) -> pb.DoneReply:
    """Translate `Done`."""
    return pb.DoneReply(changed=reply.changed)


def done_from_pb(message: pb.DoneReply) -> Done:
    """Translate `Done` back."""
    return Done(changed=message.changed)


def forgotten_to_pb(reply: Forgotten) -> pb.ResetReply:
    """Translate `Forgotten`."""
    return pb.ResetReply(num_blocks=reply.num_blocks)


def forgotten_from_pb(message: pb.ResetReply) -> Forgotten:
    """Translate `Forgotten` back."""
    return Forgotten(num_blocks=message.num_blocks)
