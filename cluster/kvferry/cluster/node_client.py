"""What an engine asks of its node; everything else it asks as a client of the control front."""

from kvferry.cluster.attached_store import AttachedStore, attached_from_pb
from kvferry.cluster.control_client import require_address, require_timeout
from kvferry.cluster.engine_info import (
    AttachedEngine,
    EngineInfo,
    attached_engine_from_pb,
    engine_to_pb,
)
from kvferry.proto.credentials import Credentials
from kvferry.proto.identity import Identity, identity_to_cbor
from kvferry.proto.v1 import node_pb2, node_pb2_grpc
from kvferry.worker.grpc_channels import Channels


class NodeClient:
    """A connection to a node's front, made at the first call. Thread-safe; close it when done.

    Make it after a fork, never before.

    Args:
        address: `host:port` of the front.
        credentials: what this client shows to it, and asks of it; None speaks plaintext.

    Raises:
        ConfigError: the address is not of that form.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address = require_address(address)
        self._channels = Channels(credentials)

    def attach(
        self, identity: Identity, *, timeout_s: float, engine: EngineInfo | None = None
    ) -> AttachedStore:
        """Return the node's store of an identity, made now if there was none.

        With an `engine`, the node's list of engines names it for `engine_roll.FORGET_S` seconds.

        Raises:
            ConfigError: the timeout is out of range.
            ResourcesError: the node has no room for it.
            UnavailableError: nobody answers at the address, or the coordinator does not.
            CredentialsError: one side does not take the other's certificate or token.
            DeadlineError: no answer within `timeout_s`.
        """
        request = node_pb2.AttachRequest(
            identity_cbor=identity_to_cbor(identity),
            engine=None if engine is None else engine_to_pb(engine),
        )
        with self._channels.lend(self.address) as channel:
            reply = node_pb2_grpc.NodeStub(channel).Attach(
                request, timeout=require_timeout(timeout_s)
            )
        return attached_from_pb(reply)

    def engines(self, *, timeout_s: float) -> tuple[AttachedEngine, ...]:
        """Return the engines that have attached to the node lately.

        Raises:
            KvferryError: as `attach`.
        """
        with self._channels.lend(self.address) as channel:
            reply = node_pb2_grpc.NodeStub(channel).Engines(
                node_pb2.EnginesRequest(), timeout=require_timeout(timeout_s)
            )
        return tuple(map(attached_engine_from_pb, reply.engines))

    def close(self) -> None:
        """Close the connection. Calls under way end with UnavailableError."""
        self._channels.close()
