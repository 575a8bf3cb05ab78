"""Speaks the coordinator's commands over gRPC: `ControlClient.call(command)` from any process.

Only the commands of clients travel this way; engines have `coordinator_client.py`.
"""

import re
from numbers import Real
from typing import TypeVar, get_args

from kvferry.cluster.grpc_control import ControlConnection
from kvferry.cluster.moving_address import FindAddress, MovingAddress
from kvferry.proto import control_codec as codec
from kvferry.proto import description_codec
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.grpc_status import MAX_CALL_S
from kvferry.proto.messages import (
    AcquireLease,
    ClientCommand,
    Command,
    Describe,
    Locate,
    ReleaseLease,
    RenewLease,
    Reply,
    ResetIdentity,
    expect,
)
from kvferry.proto.v1 import control_pb2 as pb
from kvferry.proto.v1 import control_pb2_grpc
from kvferry.worker.own_process import OwnProcess

_R = TypeVar("_R")


def require_timeout(timeout_s: object) -> float:
    """Return the timeout in seconds if it is one.

    Raises:
        ConfigError: no number, not positive, or more than a front lets a call last.
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_CALL_S:  # type: ignore[operator]
        raise ConfigError(
            "the timeout must be positive and not too long",
            given=repr(timeout_s),
            allowed=f"seconds, above 0 and up to {MAX_CALL_S}",
        )
    return float(timeout_s)  # type: ignore[arg-type]


def require_address(address: object) -> str:
    """Return the address of a front if it is one.

    Raises:
        ConfigError: not `host:port`, or the port is out of range.
    """
    parts = re.fullmatch(
        r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})",
        address if isinstance(address, str) else "",
    )
    if not isinstance(address, str) or parts is None or not 1 <= int(parts[1]) <= 65535:
        raise ConfigError(
            "not the address of a control front",
            given=repr(address),
            allowed="host:port, the port from 1 to 65535",
        )
    return address


class ControlClient:
    """A channel to one control front. Safe to use from several threads; close it when done.

    Make it after a fork, never before.

    Args:
        address: `host:port` of the front (`[host]:port` for IPv6).
        timeout_s: deadline of each call in seconds, at most `MAX_CALL_S`.
        credentials: what this client shows to the front, and asks of it; None speaks plaintext.
        find: tells where the front is after a call that nobody answered, None: at this address.

    Raises:
        ConfigError: the address is not of that form, or the timeout out of range.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        credentials: Credentials | None = None,
        find: FindAddress | None = None,
    ) -> None:
        self.address = require_address(address)
        self.timeout_s = require_timeout(timeout_s)
        self._is_closed = False
        self._own_process = OwnProcess()
        self._connection = ControlConnection(MovingAddress(address, find), credentials)

    def call(self, command: Command, timeout_s: float | None = None) -> Reply:
        """Carry out one command and return the coordinator's reply.

        Args:
            command: one of those that travel this way.
            timeout_s: deadline of this call in seconds; None takes the client's own.

        Raises:
            BadInputError: a command that does not travel this way, a field of a wrong kind, or
                this process was forked off since the client was made.
            UnavailableError: nobody answers at the address, or this client is closed.
            CredentialsError: one side does not take the other's certificate or token.
            DeadlineError: no answer within the deadline.
            KvferryError: whatever the coordinator refused the command with.
        """
        self._own_process.require()
        if self._is_closed:
            raise UnavailableError("this client is closed", given=self.address)
        try:
            with self._connection.stub() as stub:
                deadline_s = self.timeout_s if timeout_s is None else timeout_s
                return _exchange(stub, command, deadline_s)
        except (TypeError, ValueError) as error:
            if isinstance(error, KvferryError):
                raise
            # Protobuf refuses fields of a wrong kind in its own words.
            raise BadInputError(
                "a field of the command is of a wrong kind", given=str(error)
            ) from error

    def ask(self, command: Command, expected: type[_R], timeout_s: float | None = None) -> _R:
        """As `call`, for a reply of the expected kind.

        Raises:
            InvariantError: the reply is of another kind.
            KvferryError: as `call`.
        """
        return expect(self.call(command, timeout_s), expected)

    def close(self) -> None:
        """Close the channel. Repeatable. Calls under way end with UnavailableError."""
        self._is_closed = True
        self._connection.close()


def _exchange(stub: control_pb2_grpc.ControlStub, command: Command, timeout: float) -> Reply:
    match command:
        case Describe():
            description = stub.Describe(pb.DescribeRequest(), timeout=timeout)
            return description_codec.description_from_pb(description)
        case Locate():
            located = stub.Locate(codec.locate_to_pb(command), timeout=timeout)
            return codec.located_from_pb(located)
        case AcquireLease():
            leased = stub.AcquireLease(codec.acquire_lease_to_pb(command), timeout=timeout)
            return codec.leased_from_pb(leased)
        case RenewLease():
            leased = stub.RenewLease(codec.renew_lease_to_pb(command), timeout=timeout)
            return codec.leased_from_pb(leased)
        case ReleaseLease():
            done = stub.ReleaseLease(codec.release_lease_to_pb(command), timeout=timeout)
            return codec.done_from_pb(done)
        case ResetIdentity():
            forgotten = stub.Reset(codec.reset_to_pb(command), timeout=timeout)
            return codec.forgotten_from_pb(forgotten)
    raise BadInputError(
        "this command does not travel over the control front",
        given=type(command).__name__,
        allowed=[kind.__name__ for kind in get_args(ClientCommand)],
    )
