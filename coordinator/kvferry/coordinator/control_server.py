"""The gRPC control front: carries an outside engine's commands to the coordinator.

Decides nothing: translates, calls, translates back, and turns every error into a status, so that
no handler can leave a client waiting for its deadline.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.proto import control_codec as codec
from kvferry.proto.bind import require_safe_bind
from kvferry.proto.errors import ConfigError, InvariantError, KvferryError, PortTakenError
from kvferry.proto.grpc_status import ERROR_METADATA_KEY, MAX_DETAILS_CHARS, encode_error
from kvferry.proto.messages import Command, Describe, Description, Done, Leased, Located, Reply
from kvferry.proto.v1 import control_pb2 as pb
from kvferry.proto.v1 import control_pb2_grpc

SERVICE_NAME = "kvferry.control.v1.Control"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
NUM_THREADS = 8
# Calls beyond the threads wait in the pool's queue; beyond this bound they are refused at once.
MAX_CONCURRENT_CALLS = 256
STOP_GRACE_S = 2.0

_log = logging.getLogger(__name__)
_R = TypeVar("_R")


class ControlServer:
    """A running control front.

    Args:
        call: carries one command to the coordinator and returns its reply; called from several
            threads at once.
        bind: host to listen on.
        port: TCP port; 0 takes any free one.
        insecure: allows a host beyond loopback.

    Raises:
        InsecureBindError: `bind` is beyond loopback and `insecure` is False.
        ConfigError: the port is out of range.
        PortTakenError: the address cannot be listened on.

    """

    def __init__(
        self, call: Callable[[Command], Reply], *, bind: str, port: int, insecure: bool
    ) -> None:
        require_safe_bind(bind, insecure)
        if not 0 <= port <= 65535:
            raise ConfigError("port out of range", given=port, allowed="0 to 65535")
        self._health = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="control"),
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # With port sharing a second process would silently take half of the connections.
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        control_pb2_grpc.add_ControlServicer_to_server(_Servicer(call), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        host = f"[{bind}]" if ":" in bind else bind
        try:
            bound_port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise PortTakenError(
                "cannot listen: another process has the port, or the host is not this machine's",
                given=f"{host}:{port}",
                allowed="a free port of this machine, or port 0 for any",
            ) from error
        self._server.start()
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.address = f"{host}:{bound_port}"

    def stop(self) -> None:
        """Report NOT_SERVING, let calls under way end for `STOP_GRACE_S`, and close. Repeatable."""
        self._health.enter_graceful_shutdown()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)


class _Servicer(control_pb2_grpc.ControlServicer):
    def __init__(self, call: Callable[[Command], Reply]) -> None:
        self._call = call

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeReply:
        return _guarded(
            context, lambda: codec.description_to_pb(self._ask(Describe(), Description))
        )

    def Locate(self, request: pb.LocateRequest, context: grpc.ServicerContext) -> pb.LocateReply:
        return _guarded(
            context,
            lambda: codec.located_to_pb(self._ask(codec.locate_from_pb(request), Located)),
        )

    def AcquireLease(
        self, request: pb.AcquireLeaseRequest, context: grpc.ServicerContext
    ) -> pb.LeaseReply:
        return _guarded(
            context,
            lambda: codec.leased_to_pb(self._ask(codec.acquire_lease_from_pb(request), Leased)),
        )

    def RenewLease(
        self, request: pb.RenewLeaseRequest, context: grpc.ServicerContext
    ) -> pb.LeaseReply:
        return _guarded(
            context,
            lambda: codec.leased_to_pb(self._ask(codec.renew_lease_from_pb(request), Leased)),
        )

    def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, context: grpc.ServicerContext
    ) -> pb.DoneReply:
        return _guarded(
            context,
            lambda: codec.done_to_pb(self._ask(codec.release_lease_from_pb(request), Done)),
        )

    def _ask(self, command: Command, expected: type[_R]) -> _R:
        reply = self._call(command)
        if not isinstance(reply, expected):
            raise InvariantError(
                f"{type(command).__name__} was answered with another kind of reply",
                given=type(reply).__name__,
                allowed=expected.__name__,
            )
        return reply


def _guarded(context: grpc.ServicerContext, answer: Callable[[], _R]) -> _R:
    try:
        return answer()
    except KvferryError as error:
        failure = error
    except Exception as error:  # whatever it is, the client must hear of it
        _log.exception("a control call failed")
        failure = InvariantError("the coordinator failed", given=f"{type(error).__name__}: {error}")
    _abort(context, failure)


def _abort(context: grpc.ServicerContext, error: KvferryError) -> NoReturn:
    context.set_trailing_metadata(((ERROR_METADATA_KEY, encode_error(error)),))
    context.abort(grpc.StatusCode[error.grpc_status], str(error)[:MAX_DETAILS_CHARS])
    raise AssertionError("abort returned")
