"""The gRPC control front: carries the commands of engines and clients to the coordinator.

Decides nothing: translates, calls, translates back, and turns every error into a status, so that
no handler can leave a client waiting for its deadline.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar, get_args

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.proto import control_codec as codec
from kvferry.proto import description_codec
from kvferry.proto.bind import join_address, require_safe_bind
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    InvariantError,
    KvferryError,
    MismatchError,
)
from kvferry.proto.grpc_front import abort, add_reflection, listen, make_server
from kvferry.proto.grpc_status import decode_message, require_call_seconds
from kvferry.proto.messages import (
    AcquireLease,
    Command,
    Describe,
    Description,
    Done,
    Forgotten,
    Leased,
    Located,
    PackedCommand,
    ReleaseLease,
    RenewLease,
    Reply,
    ResetIdentity,
    expect,
)
from kvferry.proto.packed_messages import SCHEMA, pack_reply, unpack_command
from kvferry.proto.v1 import control_pb2 as pb

SERVICE_NAME = "kvferry.control.v1.Control"
NUM_THREADS = 8
# Calls beyond the threads wait in the pool's queue; beyond this bound they are refused at once.
MAX_CONCURRENT_CALLS = 256
STOP_GRACE_S = 2.0

_log = logging.getLogger(__name__)


class ControlServer:
    """A running control front.

    Args:
        call: carries one command to the coordinator and returns its reply; called from several
            threads at once.
        bind: host to listen on.
        port: TCP port; 0 takes any free one.
        insecure: allows a host beyond loopback without credentials that tell clients apart.
        credentials: speak TLS with these; None speaks plaintext.
        reflection: tell clients of the services and messages.

    Raises:
        InsecureBindError: as `require_safe_bind`.
        ConfigError: the port is out of range, or the credentials cannot be used.
        PortTakenError: another process listens on the port.

    """

    def __init__(
        self,
        call: Callable[[Command], Reply],
        *,
        bind: str,
        port: int,
        insecure: bool,
        credentials: Credentials | None = None,
        reflection: bool = False,
    ) -> None:
        require_safe_bind(bind, insecure, credentials)
        if not 0 <= port <= 65535:
            raise ConfigError("port out of range", given=port, allowed="0 to 65535")
        self._health = health.HealthServicer()
        self._server = make_server(
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="control"),
            credentials,
            max_calls=MAX_CONCURRENT_CALLS,
        )
        self._server.add_generic_rpc_handlers((_Handlers(call).as_grpc(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection:
            add_reflection(self._server, [SERVICE_NAME, health.SERVICE_NAME])
        self.address = join_address(bind, listen(self._server, bind, port, credentials))
        self._server.start()
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Report NOT_SERVING, let calls under way end for `STOP_GRACE_S`, and close. Repeatable."""
        self._health.enter_graceful_shutdown()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)


class _Handlers:
    """Takes requests as bytes: gRPC would call a malformed one its own internal error."""

    def __init__(self, call: Callable[[Command], Reply]) -> None:
        self._call = call

    def as_grpc(self) -> grpc.GenericRpcHandler:
        """Return the service for a gRPC server."""
        methods = {
            "Describe": self._describe,
            "Locate": self._locate,
            "AcquireLease": self._acquire_lease,
            "RenewLease": self._renew_lease,
            "ReleaseLease": self._release_lease,
            "Reset": self._reset,
            "Execute": self._execute,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                name: grpc.unary_unary_rpc_method_handler(_guarded(method))
                for name, method in methods.items()
            },
        )

    def _describe(self, request: bytes) -> pb.DescribeReply:
        decode_message(pb.DescribeRequest, request)
        return description_codec.description_to_pb(expect(self._call(Describe()), Description))

    def _locate(self, request: bytes) -> pb.LocateReply:
        command = codec.locate_from_pb(decode_message(pb.LocateRequest, request))
        return codec.located_to_pb(expect(self._call(command), Located))

    def _acquire_lease(self, request: bytes) -> pb.LeaseReply:
        command = codec.acquire_lease_from_pb(decode_message(pb.AcquireLeaseRequest, request))
        return codec.leased_to_pb(expect(self._call(_as_clients(command)), Leased))

    def _renew_lease(self, request: bytes) -> pb.LeaseReply:
        command = codec.renew_lease_from_pb(decode_message(pb.RenewLeaseRequest, request))
        return codec.leased_to_pb(expect(self._call(_as_clients(command)), Leased))

    def _release_lease(self, request: bytes) -> pb.DoneReply:
        command = codec.release_lease_from_pb(decode_message(pb.ReleaseLeaseRequest, request))
        return codec.done_to_pb(expect(self._call(_as_clients(command)), Done))

    def _reset(self, request: bytes) -> pb.ResetReply:
        command = codec.reset_from_pb(decode_message(pb.ResetRequest, request))
        return codec.forgotten_to_pb(expect(self._call(_as_clients(command)), Forgotten))

    def _execute(self, request: bytes) -> pb.ExecuteReply:
        message = decode_message(pb.ExecuteRequest, request)
        if message.schema != SCHEMA:
            raise MismatchError(
                "another version of kvferry packs its commands in another way",
                given={"schema": message.schema.hex()},
                allowed={"schema": SCHEMA.hex()},
            )
        command = unpack_command(message.command)
        if not isinstance(command, PackedCommand):
            raise BadInputError(
                "not a command that travels packed",
                given=type(command).__name__,
                allowed=[kind.__name__ for kind in get_args(PackedCommand)],
            )
        return pb.ExecuteReply(reply=pack_reply(self._call(command)))


_C = TypeVar("_C", AcquireLease, RenewLease, ReleaseLease, ResetIdentity)


def _as_clients(command: _C) -> _C:
    """Give the command an id that no engine's or router's command has."""
    return replace(command, call_id=f"client/{command.call_id}")


def _guarded(
    method: Callable[[bytes], Message],
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """Return the method as gRPC calls it; whatever fails, the client hears of it."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            require_call_seconds(context.time_remaining())
            return method(request).SerializeToString()
        except KvferryError as error:
            failure = error
        except Exception as error:
            _log.exception("a control call failed")
            failure = InvariantError(
                "the coordinator failed", given=f"{type(error).__name__}: {error}"
            )
        abort(context, failure)

    return answer
