"""The store that a node gives an engine, and how it travels."""

from dataclasses import dataclass

from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.v1 import node_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedStore:
    """A registered store of one identity, whose blocks are hash blocks.

    `transfer_address` is `host:port`. `num_blocks` includes the null block. `hash_block_tokens` are
    the tokens of a block, and of one hash.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    transfer_address: str
    num_blocks: int
    hash_block_tokens: int


def attached_to_pb(store: AttachedStore) -> pb.AttachReply:
    """Return the reply that tells of the store."""
    return pb.AttachReply(
        instance_id=store.instance_id,
        incarnation=store.incarnation,
        transfer_address=store.transfer_address,
        num_blocks=store.num_blocks,
        hash_block_tokens=store.hash_block_tokens,
    )


def attached_from_pb(reply: pb.AttachReply) -> AttachedStore:
    """Return the store that the reply tells of."""
    return AttachedStore(
        instance_id=InstanceId(reply.instance_id),
        incarnation=Incarnation(reply.incarnation),
        transfer_address=reply.transfer_address,
        num_blocks=reply.num_blocks,
        hash_block_tokens=reply.hash_block_tokens,
    )
