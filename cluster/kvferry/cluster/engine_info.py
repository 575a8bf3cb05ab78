"""The engines that attach to a node, as they introduce themselves, and how that travels."""

from dataclasses import dataclass

from kvferry.proto.layout import Layout
from kvferry.proto.layout_text import layout_text, parse_layout
from kvferry.proto.v1 import node_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One engine: a name that no other engine of the node has, its layout, and what it runs.

    `version` is free text, such as "vllm 0.32.0".
    """

    engine_id: str
    layout: Layout
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedEngine:
    """An engine that has attached under an identity, `seen_s` seconds ago for the last time."""

    engine: EngineInfo
    identity_digest: bytes
    seen_s: float


def engine_to_pb(engine: EngineInfo) -> pb.Engine:
    """Return the message that tells of the engine."""
    return pb.Engine(
        engine_id=engine.engine_id, layout=layout_text(engine.layout), version=engine.version
    )


def engine_from_pb(message: pb.Engine) -> EngineInfo:
    """Return the engine that the message tells of.

    Raises:
        ConfigError: a layout that this version does not know.
    """
    return EngineInfo(
        engine_id=message.engine_id,
        layout=parse_layout(message.layout),
        version=message.version,
    )


def attached_engine_to_pb(one: AttachedEngine) -> pb.AttachedEngine:
    """Return the message that tells of an attached engine."""
    return pb.AttachedEngine(
        engine=engine_to_pb(one.engine), identity_digest=one.identity_digest, seen_s=one.seen_s
    )


def attached_engine_from_pb(message: pb.AttachedEngine) -> AttachedEngine:
    """Return the attached engine that the message tells of.

    Raises:
        ConfigError: a layout that this version does not know.
    """
    return AttachedEngine(
        engine=engine_from_pb(message.engine),
        identity_digest=message.identity_digest,
        seen_s=message.seen_s,
    )
