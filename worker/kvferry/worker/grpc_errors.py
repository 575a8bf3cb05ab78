"""Between kvferry's errors and gRPC's: how a handler refuses, and what a failed call meant."""

import logging
from typing import Any, NoReturn

import grpc

from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.grpc_status import (
    ERROR_METADATA_KEY,
    MAX_DETAILS_CHARS,
    encode_error,
    error_from_status,
    require_call_seconds,
)

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
    context.set_trailing_metadata(((ERROR_METADATA_KEY, encode_error(failure)),))
    context.abort(grpc.StatusCode[failure.grpc_status], str(failure)[:MAX_DETAILS_CHARS])


def require_deadline(context: grpc.ServicerContext) -> None:
    """Refuse a call that could hold a thread for too long.

    Raises:
        BadInputError: the call has no deadline, or one beyond `MAX_CALL_S`.
    """
    require_call_seconds(context.time_remaining())


def error_of_call(failed: grpc.RpcError, address: str) -> KvferryError:
    """Return the kvferry error behind a failed call to `address`."""
    call: Any = failed
    encoded = next(
        (value for key, value in call.trailing_metadata() or () if key == ERROR_METADATA_KEY), None
    )
    return error_from_status(call.code().name, f"{address}: {call.details()}", encoded)
