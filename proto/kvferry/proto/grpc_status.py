"""What both fronts ask of a call, and errors on the wire: in a gRPC trailer or as a bare status.

Knows gRPC only by the names of its status codes, so both fronts and both clients share it.
"""

import json
import re
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    CredentialsError,
    DeadlineError,
    KvferryError,
    MessageTooLargeError,
    MismatchError,
    NotFoundError,
    StaleError,
    TransferError,
    UnavailableError,
    class_named,
)
from kvferry.proto.grpc_options import MAX_MESSAGE_BYTES

ERROR_METADATA_KEY = "kvferry-error-bin"
TOKEN_METADATA_KEY = "authorization"

# A call holds a thread of the front until it ends, so nobody may hold one much longer than work
# takes. A client may ask for exactly this much; gRPC rounds deadlines up on their way.
MAX_CALL_S = 300.0
_ROUNDING_S = 1.0

# gRPC's default bound on all trailing metadata of a call is 8 KiB; an error over this size loses
# its values rather than its delivery.
MAX_ERROR_BYTES = 4096
MAX_DETAILS_CHARS = 1024

# gRPC reports a call without a deadline as one that ends in centuries.
_NO_DEADLINE_S = 10 * 365 * 86_400.0

_CLASS_OF_STATUS: dict[str, type[KvferryError]] = {
    "INVALID_ARGUMENT": BadInputError,
    "OUT_OF_RANGE": BadInputError,
    "UNIMPLEMENTED": BadInputError,
    "UNAUTHENTICATED": CredentialsError,
    "PERMISSION_DENIED": BadInputError,
    "FAILED_PRECONDITION": MismatchError,
    "ABORTED": StaleError,
    "NOT_FOUND": NotFoundError,
    "UNAVAILABLE": UnavailableError,
    "CANCELLED": UnavailableError,
    "RESOURCE_EXHAUSTED": BusyError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "DATA_LOSS": TransferError,
}


# How gRPC words its own refusal of a message, on either side.
_TOO_LARGE = re.compile(r"message larger than max \((\d{1,20}) vs\. (\d{1,20})\)")

_M = TypeVar("_M", bound=Message)


def bearer(token: str) -> str:
    """Return what a client that has the token sends as `TOKEN_METADATA_KEY`."""
    return f"Bearer {token}"


def require_call_seconds(remaining_s: float | None) -> None:
    """Refuse a call that could hold a thread of the front for too long.

    Args:
        remaining_s: seconds until the call's deadline; None, or centuries, when it has none.

    Raises:
        BadInputError: the call has no deadline, or one beyond `MAX_CALL_S`.
    """
    if remaining_s is None or remaining_s > _NO_DEADLINE_S:
        raise BadInputError("a call without a deadline", allowed=f"up to {MAX_CALL_S} s")
    if remaining_s > MAX_CALL_S + _ROUNDING_S:
        raise BadInputError(
            "a call with a deadline too far away",
            given=f"{remaining_s:.0f} s",
            allowed=f"up to {MAX_CALL_S} s",
        )


def decode_message(kind: type[_M], data: bytes, *, at_most: int = MAX_MESSAGE_BYTES) -> _M:
    """Return the protobuf message in `data`.

    The fronts decode here rather than in gRPC, which would call a malformed message its own
    internal error.

    Raises:
        MessageTooLargeError: more bytes than `at_most`.
        BadInputError: the bytes are no message of that kind.
    """
    if len(data) > at_most:
        raise MessageTooLargeError(
            f"a {kind.DESCRIPTOR.name} of more bytes than this server takes",
            given=len(data),
            allowed=at_most,
        )
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadInputError(
            f"not a {kind.DESCRIPTOR.name}", given=f"{len(data)} bytes", allowed="protobuf"
        ) from error


def encode_error(error: KvferryError) -> bytes:
    """Return the error as the JSON bytes of the trailer, at most `MAX_ERROR_BYTES` long."""
    encoded = json.dumps(error.to_json(), default=str).encode()
    if len(encoded) <= MAX_ERROR_BYTES:
        return encoded
    bare = {"type": type(error).__name__, "message": error.message[:MAX_DETAILS_CHARS]}
    return json.dumps(bare).encode()


def error_from_status(status: str, details: str, encoded: bytes | None) -> KvferryError:
    """Return the error that a failed call stands for.

    Args:
        status: name of the gRPC status code, e.g. "UNAVAILABLE".
        details: the status's text.
        encoded: value of the trailer `ERROR_METADATA_KEY`, None when the peer sent none (the call
            failed in gRPC itself).

    An error class this version does not know becomes the class of the status.
    """
    fallback = _CLASS_OF_STATUS.get(status, KvferryError)
    try:
        plain = json.loads(encoded) if encoded is not None else None
    except (ValueError, RecursionError):  # the latter for brackets within brackets
        plain = None
    if not isinstance(plain, dict):
        too_large = _TOO_LARGE.search(details)
        if too_large:
            num_bytes, most = map(int, too_large.groups())
            return MessageTooLargeError(details, given=num_bytes, allowed=most)
        return fallback(details or "the call failed", given=status)
    error_class = class_named(str(plain.get("type"))) or fallback
    return error_class(
        str(plain.get("message", details)), given=plain.get("given"), allowed=plain.get("allowed")
    )
