"""The gRPC front of a node: attaching, and everything that the coordinator's own front answers.

Decides nothing: translates, calls, translates back, and turns every error into a status.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.cluster.attached_store import AttachedStore, attached_to_pb
from kvferry.cluster.engine_info import (
    AttachedEngine,
    EngineInfo,
    attached_engine_to_pb,
    engine_from_pb,
)
from kvferry.cluster.grpc_forward import ForwardedService
from kvferry.cluster.moving_address import MovingAddress
from kvferry.cluster.node_config import NodeConfig
from kvferry.coordinator.control_server import SERVICE_NAME as CONTROL
from kvferry.proto.bind import join_address
from kvferry.proto.grpc_front import listen, make_server
from kvferry.proto.grpc_status import decode_message
from kvferry.proto.identity import Identity, identity_from_cbor
from kvferry.proto.v1 import node_pb2 as pb
from kvferry.worker.grpc_errors import abort_with, require_deadline

SERVICE_NAME = "kvferry.node.v1.Node"
NUM_THREADS = 16
# Calls beyond the threads wait in the pool's queue; beyond this bound they are refused at once.
MAX_CONCURRENT_CALLS = 256
STOP_GRACE_S = 2.0


class Node(Protocol):
    """What stands behind the front; called from several threads at once."""

    def attach(
        self, identity: Identity, timeout_s: float, engine: EngineInfo | None
    ) -> AttachedStore:
        """Return the store of an identity, within `timeout_s`."""

    def engines(self) -> tuple[AttachedEngine, ...]:
        """Return the engines that have attached lately."""


class NodeServer:
    """A running front, from construction to `stop`.

    Args:
        node: what answers, but for the control front's calls.
        config: where it listens.
        coordinator: where the coordinator does.

    Raises:
        PortTakenError: another process listens on the port.
        ConfigError: this machine cannot listen on `bind`, or not with these credentials.
    """

    def __init__(self, node: Node, config: NodeConfig, coordinator: MovingAddress) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvferry-node")
        self._health = health.HealthServicer()
        self._control = ForwardedService(
            CONTROL,
            place=coordinator,
            who="the coordinator",
            credentials=config.credentials,
        )
        self._server = make_server(
            self._threads, config.credentials, max_calls=MAX_CONCURRENT_CALLS
        )
        self._server.add_generic_rpc_handlers((self._control, _handlers(node)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = listen(self._server, config.bind, config.port, config.credentials)
        self.address = join_address(config.bind, port)
        self._server.start()
        for name in ("", CONTROL, SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Report NOT_SERVING, let calls under way end for `STOP_GRACE_S`, and close. Repeatable."""
        self._health.enter_graceful_shutdown()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
        self._control.close()
        self._threads.shutdown(wait=False)


def _handlers(node: Node) -> grpc.GenericRpcHandler:
    def attach(request: bytes, timeout_s: float) -> Message:
        asked = decode_message(pb.AttachRequest, request)
        identity = identity_from_cbor(asked.identity_cbor)
        engine = engine_from_pb(asked.engine) if asked.HasField("engine") else None
        return attached_to_pb(node.attach(identity, timeout_s, engine))

    def engines(request: bytes, timeout_s: float) -> Message:
        decode_message(pb.EnginesRequest, request)
        return pb.EnginesReply(engines=map(attached_engine_to_pb, node.engines()))

    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "Attach": grpc.unary_unary_rpc_method_handler(_guarded(attach)),
            "Engines": grpc.unary_unary_rpc_method_handler(_guarded(engines)),
        },
    )


def _guarded(
    method: Callable[[bytes, float], Message],
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """Return the method as gRPC calls it; whatever fails, the client hears of it."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            require_deadline(context)
            return method(request, context.time_remaining()).SerializeToString()
        except Exception as error:
            abort_with(context, error)

    return answer
