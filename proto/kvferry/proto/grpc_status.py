"""Errors on the wire: how an error rides in a gRPC trailer, and what a bare status means.

Knows gRPC only by the names of its status codes, so both fronts and both clients share it.
"""

import json

from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    DeadlineError,
    KvferryError,
    MismatchError,
    NotFoundError,
    StaleError,
    TransferError,
    UnavailableError,
)

ERROR_METADATA_KEY = "kvferry-error-bin"

# gRPC's default bound on all trailing metadata of a call is 8 KiB; an error over this size loses
# its values rather than its delivery.
MAX_ERROR_BYTES = 4096
MAX_DETAILS_CHARS = 1024

_CLASS_OF_STATUS: dict[str, type[KvferryError]] = {
    "INVALID_ARGUMENT": BadInputError,
    "OUT_OF_RANGE": BadInputError,
    "UNIMPLEMENTED": BadInputError,
    "UNAUTHENTICATED": BadInputError,
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
    except ValueError:
        plain = None
    if not isinstance(plain, dict):
        return fallback(details or "the call failed", given=status)
    error_class = _CLASS_OF_NAME.get(str(plain.get("type")), fallback)
    return error_class(
        str(plain.get("message", details)), given=plain.get("given"), allowed=plain.get("allowed")
    )


def _tree(root: type[KvferryError]) -> dict[str, type[KvferryError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_CLASS_OF_NAME = _tree(KvferryError)
