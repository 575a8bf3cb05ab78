"""The gRPC front of a worker: it turns messages into values and errors into statuses, no more."""

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
from grpc_health.v1 import (
    health,
    health_pb2,
    health_pb2_grpc,
)

from kvferry.proto.bind import require_safe_bind
from kvferry.proto.errors import ConfigError, PortTakenError
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.frames import Frame, Header
from kvferry.worker.grpc_errors import abort_with, require_deadline
from kvferry.worker.grpc_options import SERVER_OPTIONS
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    WorkerDescription,
    description_to_proto,
    encode_reply,
    fetch_ask_from_proto,
    store_part_from_proto,
)

# One thread serves one call. As many calls as threads: a call beyond them is refused at once
# instead of waiting unseen behind a slow one.
MAX_CONCURRENT_CALLS = 16
STOP_GRACE_S = 2.0
SERVICE_NAME = "kvferry.transfer.v1.Transfer"


class Transfers(Protocol):
    """What stands behind the front."""

    def describe(self) -> WorkerDescription:
        """Say who this worker is."""

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | Frame]:
        """Yield a header, then frames."""

    def accept_store(self, parts: Iterator[StoreAsk | Frame]) -> int:
        """Take a header, then frames; return the number of blocks that are here now."""


class TransferServer:
    """A listening server from construction to `stop`.

    Args:
        service: what answers.
        bind: host to listen on.
        port: 0 lets the system choose.
        insecure: allow a host beyond loopback.

    Raises:
        InsecureBindError: `bind` is not loopback and `insecure` is False.
        PortTakenError: another process listens on the port.
        ConfigError: this machine cannot listen on `bind`.
    """

    def __init__(self, service: Transfers, *, bind: str, port: int = 0, insecure: bool) -> None:
        require_safe_bind(bind, insecure)
        self._threads = ThreadPoolExecutor(
            MAX_CONCURRENT_CALLS, thread_name_prefix="kvferry-transfer"
        )
        self._server = grpc.server(
            self._threads,
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        self._server.add_generic_rpc_handlers((_Handlers(service).as_grpc(),))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._listen(bind, port)
        self.address = _join_address(bind, self.port)
        self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        self._server.start()

    def stop(self) -> None:
        """Refuse new calls, give running ones `STOP_GRACE_S`, then end them. Repeating is fine."""
        self._health.enter_graceful_shutdown()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
        self._threads.shutdown(wait=False)

    def _listen(self, bind: str, port: int) -> int:
        try:
            chosen: int = self._server.add_insecure_port(_join_address(bind, port))
        except RuntimeError as error:
            self._threads.shutdown(wait=False)
            raise _why_not_listening(bind, port) from error
        return chosen


class _Handlers:
    """Every handler catches everything: one that dies silently leaves its client waiting."""

    def __init__(self, service: Transfers) -> None:
        self._service = service

    def as_grpc(self) -> grpc.GenericRpcHandler:
        """Return the service for a gRPC server; Fetch yields bytes that are encoded already."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(
                    self._describe,
                    request_deserializer=transfer_pb2.DescribeRequest.FromString,
                    response_serializer=transfer_pb2.DescribeReply.SerializeToString,
                ),
                "Fetch": grpc.unary_stream_rpc_method_handler(
                    self._fetch, request_deserializer=transfer_pb2.FetchRequest.FromString
                ),
                "Store": grpc.stream_unary_rpc_method_handler(
                    self._store,
                    request_deserializer=transfer_pb2.StoreRequest.FromString,
                    response_serializer=transfer_pb2.StoreReply.SerializeToString,
                ),
            },
        )

    def _describe(
        self, request: transfer_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> transfer_pb2.DescribeReply:
        try:
            require_deadline(context)
            return description_to_proto(self._service.describe())
        except Exception as error:
            abort_with(context, error)

    def _fetch(
        self, request: transfer_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        try:
            require_deadline(context)
            for part in self._service.open_fetch(fetch_ask_from_proto(request)):
                # Nobody interrupts a handler whose client has left; it has to look.
                if not context.is_active():
                    return
                yield encode_reply(part)
        except Exception as error:
            abort_with(context, error)

    def _store(
        self,
        request_iterator: Iterator[transfer_pb2.StoreRequest],
        context: grpc.ServicerContext,
    ) -> transfer_pb2.StoreReply:
        try:
            require_deadline(context)
            parts = (store_part_from_proto(message) for message in request_iterator)
            return transfer_pb2.StoreReply(num_stored=self._service.accept_store(parts))
        except Exception as error:
            abort_with(context, error)


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not_listening(host: str, port: int) -> ConfigError | PortTakenError:
    """Ask the system itself: gRPC says only that it failed."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return ConfigError(
                f"cannot listen on this host: {error.strerror}",
                given=host,
                allowed="an address of this machine",
            )
    return PortTakenError("another process listens on the port", given=port, allowed="a free port")
