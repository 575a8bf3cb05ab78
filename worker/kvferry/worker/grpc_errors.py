"""Between kvferry's errors and gRPC's: how a handler refuses, and what a failed call meant."""

import logging
from typing import Any, NoReturn

import grpc

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.grpc_front import abort
from kvferry.proto.grpc_status import (
    ERROR_METADATA_KEY,
    error_from_status,
    require_call_seconds,
)
from kvferry.proto.refused_handshake import why_no_connection

# How gRPC words it, whatever the reason.
_NOT_CONNECTED = "failed to connect"

_log = logging.getLogger(__name__)


def abort_with(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    """End a call with the status of `error`; it always raises, as handlers must not return after.

    An error that is not kvferry's is a bug: it is logged here, and the caller is told of a broken
    invariant. But for gRPC's own, with which a handler that waits for messages learns that its peer
    has left.
    """
    if isinstance(error, grpc.RpcError) and not context.is_active():
        _log.debug("a peer left a transfer: %s", context.peer())
        context.abort(grpc.StatusCode.CANCELLED, "the peer has left")
    if isinstance(error, KvferryError):
        failure = error
    else:
        _log.error("a transfer handler failed", exc_info=error)
        failure = InvariantError("the worker failed", given=f"{type(error).__name__}: {error}")
    abort(context, failure)


def require_deadline(context: grpc.ServicerContext) -> None:
    """Refuse a call that could hold a thread for too long.

    Raises:
        BadInputError: the call has no deadline, or one beyond `MAX_CALL_S`.
    """
    require_call_seconds(context.time_remaining())


def encoded_error(failed: grpc.RpcError) -> bytes | None:
    """Return the error that the peer's handler sent with its refusal; None where gRPC failed."""
    call: Any = failed
    return next(
        (value for key, value in call.trailing_metadata() or () if key == ERROR_METADATA_KEY), None
    )


def error_of_call(
    failed: grpc.RpcError, address: str, credentials: Credentials | None = None
) -> KvferryError:
    """Return the kvferry error behind a failed call to `address` by a client with `credentials`.

    Where gRPC could not connect, the server is asked why, for some seconds at most.
    """
    call: Any = failed
    status, details = call.code().name, str(call.details())
    encoded = encoded_error(failed)
    if encoded is None and status == "UNAVAILABLE" and _NOT_CONNECTED in details:
        refused = why_no_connection(address, credentials)
        if refused is not None:
            return refused
    return error_from_status(status, f"{address}: {details}", encoded)
