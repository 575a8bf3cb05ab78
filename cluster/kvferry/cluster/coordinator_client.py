"""The coordinator as engines reach it: packed commands over its gRPC front, wherever they run.

A call of a Ray actor takes longer than all that the coordinator does in an engine's step.
"""

from functools import cached_property

from kvferry.cluster.control_client import require_address
from kvferry.cluster.grpc_control import ControlConnection
from kvferry.cluster.moving_address import FindAddress, MovingAddress
from kvferry.proto.credentials import Credentials
from kvferry.proto.messages import Command, Reply
from kvferry.proto.packed_messages import SCHEMA, pack_command, unpack_reply
from kvferry.proto.v1 import control_pb2 as pb


class CoordinatorClient:
    """`CoordinatorPort` over a control front at `address` (host:port).

    `find` tells where the front is after a call that nobody answered, None: at the same address.
    Travels as these and the places of the credentials.

    Raises:
        ConfigError: a malformed address.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        find: FindAddress | None = None,
    ) -> None:
        self.address = require_address(address)
        self._credentials = credentials
        self._find = find

    def __reduce__(
        self,
    ) -> tuple[type["CoordinatorClient"], tuple[str, Credentials | None, FindAddress | None]]:
        """Travel without the connection."""
        return CoordinatorClient, (self.address, self._credentials, self._find)

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        """Have a command that travels packed executed; see `CoordinatorPort.call`."""
        request = pb.ExecuteRequest(schema=SCHEMA, command=pack_command(command))
        with self._connection.stub() as stub:
            reply = stub.Execute(request, timeout=timeout_s)
        return unpack_reply(reply.reply)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.close()

    @cached_property
    def _connection(self) -> ControlConnection:
        return ControlConnection(MovingAddress(self.address, self._find), self._credentials)
