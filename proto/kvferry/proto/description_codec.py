"""Translates the description of the service to the protobuf of `v1/control.proto` and back."""

from kvferry.proto.control_codec import (
    role_from_pb,
    scheme_from_pb,
    scheme_to_pb,
    source_from_pb,
    source_to_pb,
    state_from_pb,
)
from kvferry.proto.identity import identity_from_cbor, identity_to_cbor
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Description, InstanceInfo, InstanceStatus, KvEventsPlace
from kvferry.proto.stats_codec import held_from_pb, held_to_pb, stats_from_pb, stats_to_pb
from kvferry.proto.v1 import control_pb2 as pb


def description_to_pb(reply: Description) -> pb.DescribeReply:
    """Translate `Description`."""
    return pb.DescribeReply(
        epoch=reply.epoch,
        scheme=scheme_to_pb(reply.scheme),
        instances=[_instance_to_pb(status) for status in reply.instances],
        num_leases=reply.num_leases,
        num_handoffs=reply.num_handoffs,
        counters=reply.counters,
    )


def description_from_pb(message: pb.DescribeReply) -> Description:
    """Translate `Description` back.

    Raises:
        BadInputError: a scheme, role, state or identity this version does not know.
    """
    return Description(
        epoch=Epoch(message.epoch),
        scheme=scheme_from_pb(message.scheme),
        instances=tuple(_instance_from_pb(instance) for instance in message.instances),
        num_leases=message.num_leases,
        num_handoffs=message.num_handoffs,
        counters=dict(message.counters),
    )


def _instance_to_pb(status: InstanceStatus) -> pb.Instance:
    info = status.info
    return pb.Instance(
        source=source_to_pb(info.source),
        role=info.role,
        identity_cbor=identity_to_cbor(info.identity),
        scheme=scheme_to_pb(info.scheme),
        num_blocks=info.num_blocks,
        max_model_len_tokens=info.max_model_len,
        max_in_flight_tokens=info.max_in_flight_tokens,
        rank_pids=info.rank_pids,
        rank_nodes=info.rank_nodes,
        rank_metrics=info.rank_metrics,
        version=info.version,
        num_used_blocks=status.num_used_blocks,
        num_free_blocks=status.num_free_blocks,
        num_cached_blocks=status.num_cached_blocks,
        num_requests=status.num_requests,
        stats=stats_to_pb(status.stats),
        held=held_to_pb(status.held),
        state=status.state,
        kv_events=None if status.kv_events is None else _place_to_pb(status.kv_events),
    )


def _instance_from_pb(message: pb.Instance) -> InstanceStatus:
    source = source_from_pb(message.source)
    info = InstanceInfo(
        instance_id=source.instance_id,
        role=role_from_pb(message.role),
        incarnation=source.incarnation,
        identity=identity_from_cbor(message.identity_cbor),
        scheme=scheme_from_pb(message.scheme),
        layout=source.layout,
        num_blocks=message.num_blocks,
        rank_addresses=source.rank_addresses,
        max_model_len=message.max_model_len_tokens,
        max_in_flight_tokens=message.max_in_flight_tokens,
        rank_pids=tuple(message.rank_pids),
        rank_nodes=tuple(message.rank_nodes),
        rank_metrics=tuple(message.rank_metrics),
        version=message.version,
    )
    return InstanceStatus(
        info=info,
        num_used_blocks=message.num_used_blocks,
        num_free_blocks=message.num_free_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_requests=message.num_requests,
        stats=stats_from_pb(message.stats),
        held=held_from_pb(message.held),
        state=state_from_pb(message.state),
        kv_events=_place_from_pb(message.kv_events) if message.HasField("kv_events") else None,
    )


def _place_to_pb(place: KvEventsPlace) -> pb.KvEvents:
    return pb.KvEvents(
        endpoint=place.endpoint, replay_endpoint=place.replay_endpoint, topic=place.topic
    )


def _place_from_pb(message: pb.KvEvents) -> KvEventsPlace:
    has_replays = message.HasField("replay_endpoint")
    return KvEventsPlace(
        endpoint=message.endpoint,
        replay_endpoint=message.replay_endpoint if has_replays else None,
        topic=message.topic,
    )
