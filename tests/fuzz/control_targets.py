"""What the fronts of coordinator and nodes are told, and what their clients are."""

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from google.protobuf.message import Message
from tests.builders import make_identity
from tests.fuzz.mutating import altered, damaged

from kvferry.cluster.attached_store import AttachedStore, attached_from_pb, attached_to_pb
from kvferry.cluster.engine_info import (
    AttachedEngine,
    EngineInfo,
    attached_engine_from_pb,
    attached_engine_to_pb,
)
from kvferry.proto import control_codec as codec
from kvferry.proto.errors import KvferryError
from kvferry.proto.grpc_status import decode_message
from kvferry.proto.identity import identity_from_cbor, identity_to_cbor
from kvferry.proto.ids import BlockHash, BlockId, Epoch, Incarnation, InstanceId, LeaseId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import (
    AcquireLease,
    Holder,
    Leased,
    Locate,
    Located,
    RenewLease,
    ResetIdentity,
)
from kvferry.proto.packed_messages import pack_command, unpack_command
from kvferry.proto.restore_messages import RestoredRequest, RestoreRequests
from kvferry.proto.step_messages import AdmitAsk, Progress, Release, RunningAsk, Source, Step
from kvferry.proto.v1 import node_pb2

HASHES = tuple(BlockHash(bytes([number]) * 32) for number in range(5))
DIGEST = make_identity().digest()

_STEP = Step(
    call_id="c",
    epoch=Epoch(1),
    instance_id=InstanceId("a"),
    incarnation=Incarnation(1 << 60),
    progress=(
        Progress(request_id=RequestId("r"), num_tokens=9, num_computed_tokens=8, new_hashes=HASHES),
    ),
    releases=(Release(request_id=RequestId("r"), handoff=True),),
    running=(RunningAsk(request_id=RequestId("s"), target_tokens=3),),
    waiting=(
        AdmitAsk(request_id=RequestId("t"), num_tokens=2, target_tokens=2, hashes=HASHES[:1]),
    ),
    token_budget=7,
)

_RESTORE = RestoreRequests(
    call_id="c",
    epoch=Epoch(1),
    instance_id=InstanceId("a"),
    incarnation=Incarnation(1 << 60),
    registration="r",
    requests=(
        RestoredRequest(
            request_id=RequestId("r"),
            num_tokens=21,
            num_computed_tokens=20,
            hashes=HASHES,
            block_ids=((BlockId(1), BlockId(70_000)), (BlockId(0), BlockId(2))),
        ),
    ),
)
_LOCATE = Locate(identity_digest=DIGEST, hashes=HASHES)
_RENEW = RenewLease(call_id="c", lease_id=LeaseId("l"), ttl_s=1.0)
_RESET = ResetIdentity(call_id="c", identity_digest=DIGEST)
_LEASE = AcquireLease(
    call_id="c",
    identity_digest=DIGEST,
    hashes=HASHES,
    ttl_s=1.0,
    instance_id=InstanceId("a"),
)

_SOURCE = Source(
    instance_id=InstanceId("a"),
    incarnation=Incarnation(1),
    layout=Layout(block_tokens=4, tp=2),
    rank_addresses=("127.0.0.1:1", "127.0.0.1:2"),
)
_LOCATED = Located(
    epoch=Epoch(1),
    holders=(
        Holder(source=_SOURCE, role="decode", num_hashes=5, num_requests=0, num_free_blocks=3),
    ),
)
_LEASED = Leased(lease_id=LeaseId("l"), source=_SOURCE, num_hashes=5, ttl_s=1.0)

_ATTACHED = AttachedStore(
    instance_id=InstanceId("a"),
    incarnation=Incarnation(1),
    transfer_address="127.0.0.1:1",
    num_blocks=9,
    hash_block_tokens=4,
)

_ENGINE = AttachedEngine(
    engine=EngineInfo(engine_id="e", layout=Layout(block_tokens=4, tp=2), version="1"),
    identity_digest=DIGEST,
    seen_s=1.0,
)

_MESSAGES: tuple[tuple[Message, Callable[[Any], object]], ...] = (
    (codec.locate_to_pb(_LOCATE), codec.locate_from_pb),
    (codec.acquire_lease_to_pb(_LEASE), codec.acquire_lease_from_pb),
    (codec.renew_lease_to_pb(_RENEW), codec.renew_lease_from_pb),
    (codec.reset_to_pb(_RESET), codec.reset_from_pb),
    (codec.located_to_pb(_LOCATED), codec.located_from_pb),
    (codec.leased_to_pb(_LEASED), codec.leased_from_pb),
    (attached_to_pb(_ATTACHED), attached_from_pb),
    (
        node_pb2.AttachRequest(identity_cbor=identity_to_cbor(make_identity())),
        lambda request: identity_from_cbor(request.identity_cbor),
    ),
    (attached_engine_to_pb(_ENGINE), attached_engine_from_pb),
)
_PACKED = [pack_command(command) for command in (_STEP, _LOCATE, _LEASE, _RENEW, _RESTORE)]


def packed(random: Random) -> None:
    """Let a packed command come damaged."""
    with suppress(KvferryError):
        unpack_command(damaged(random, random.choice(_PACKED)))


def protobuf(random: Random) -> None:
    """Let a request, or a reply, of the gRPC front come changed or damaged."""
    message, from_pb = random.choice(_MESSAGES)
    data = altered(random, message)
    if random.random() < 0.5:
        data = damaged(random, data)
    with suppress(KvferryError):
        from_pb(decode_message(type(message), data))
