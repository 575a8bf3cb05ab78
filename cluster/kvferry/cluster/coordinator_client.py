"""The coordinator as engines reach it: packed commands over its gRPC front, wherever they run.

A call of a Ray actor takes longer than all that the coordinator does in an engine's step.
"""

from functools import cached_property

import grpc

from kvferry.proto.grpc_options import CHANNEL_OPTIONS
from kvferry.proto.messages import Command, Reply
from kvferry.proto.packed_messages import SCHEMA, pack_command, unpack_reply
from kvferry.proto.v1 import control_pb2 as pb
from kvferry.proto.v1 import control_pb2_grpc
from kvferry.worker.grpc_errors import error_of_call


class CoordinatorClient:
    """`CoordinatorPort` over a control front at `address` (host:port). Travels as the address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __reduce__(self) -> tuple[type["CoordinatorClient"], tuple[str]]:
        """Travel without the channel."""
        return CoordinatorClient, (self.address,)

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        """Have a command of an engine or a store executed; see `CoordinatorPort.call`."""
        request = pb.ExecuteRequest(schema=SCHEMA, command=pack_command(command))
        try:
            reply = self._stub.Execute(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of_call(error, self.address) from None
        return unpack_reply(reply.reply)

    @cached_property
    def _stub(self) -> control_pb2_grpc.ControlStub:
        return control_pb2_grpc.ControlStub(
            grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        )
