"""Passing the calls of a service on to another front, byte for byte."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from kvferry.cluster.moving_address import MovingAddress
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import DeadlineError, KvferryError, UnavailableError
from kvferry.proto.grpc_front import abort
from kvferry.worker.grpc_channels import Channels
from kvferry.worker.grpc_errors import encoded_error, require_deadline


class ForwardedService(grpc.GenericRpcHandler):
    """Makes every call of one service again elsewhere, within what is left of its deadline.

    All its calls must be unary. What the other front refuses is refused here in the same way, with
    the same error. Close it when done.

    Args:
        name: full name of the service; its methods need not be known.
        place: the address of the front that answers.
        who: answers there; for errors.
        credentials: what is shown to that front, and asked of it; None speaks plaintext.
    """

    def __init__(
        self, name: str, *, place: MovingAddress, who: str, credentials: Credentials | None
    ) -> None:
        self._prefix = f"/{name}/"
        self._place = place
        self._who = who
        self._channels = Channels(credentials)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a call of this service."""
        method = handler_call_details.method
        if not method.startswith(self._prefix):
            return None
        return grpc.unary_unary_rpc_method_handler(partial(self._forward, method))

    def close(self) -> None:
        """Close the channel. Calls under way end with UnavailableError."""
        self._channels.close()

    def _forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            require_deadline(context)
            reply = self._ask(method, request, context.time_remaining())
        except KvferryError as error:
            abort(context, error)
        if isinstance(reply, bytes):
            return reply
        context.set_trailing_metadata(reply.trailing_metadata())
        context.abort(reply.code(), reply.details())
        raise AssertionError("abort returned")

    def _ask(self, method: str, request: bytes, timeout_s: float) -> Any:
        """Return the reply, or the failed call if the other front's handler refused it.

        Raises:
            UnavailableError: nobody answers there.
            KvferryError: as gRPC fails.
        """
        address = str(self._place)
        try:
            with self._channels.lend(address) as channel:
                call: Callable[..., bytes] = channel.unary_unary(method)
                try:
                    return call(request, timeout=timeout_s)
                except grpc.RpcError as failed:
                    if encoded_error(failed) is None:
                        raise
                    return failed
        except UnavailableError as error:
            self._place.look_again()
            raise UnavailableError(
                f"{self._who} does not answer: {error.message}", given=address
            ) from error
        except DeadlineError:
            self._place.look_again()
            raise
