import json

import pytest

from kvferry.proto.bind import require_safe_bind
from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    DeadlineError,
    IdentityMismatchError,
    InsecureBindError,
    KvferryError,
    MismatchError,
    NotFoundError,
    StaleError,
    TransferError,
    UnavailableError,
)
from kvferry.proto.grpc_status import MAX_ERROR_BYTES, encode_error, error_from_status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_may_always_be_bound(host: str) -> None:
    require_safe_bind(host, insecure=False, credentials=None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-7", ""])
def test_anything_else_needs_insecure(host: str) -> None:
    with pytest.raises(InsecureBindError, match="--insecure"):
        require_safe_bind(host, insecure=False, credentials=None)
    require_safe_bind(host, insecure=True, credentials=None)


def test_an_error_arrives_as_its_own_class_with_both_values() -> None:
    sent = IdentityMismatchError("two models", given={"model": "a"}, allowed={"model": "b"})
    arrived = error_from_status("FAILED_PRECONDITION", "ignored", encode_error(sent))
    assert type(arrived) is IdentityMismatchError
    assert (arrived.message, arrived.given, arrived.allowed) == (
        "two models",
        {"model": "a"},
        {"model": "b"},
    )


def test_a_class_from_a_newer_version_becomes_the_class_of_the_status() -> None:
    encoded = json.dumps({"type": "FutureError", "message": "new"}).encode()
    arrived = error_from_status("NOT_FOUND", "", encoded)
    assert type(arrived) is NotFoundError
    assert arrived.message == "new"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("INVALID_ARGUMENT", BadInputError),
        ("FAILED_PRECONDITION", MismatchError),
        ("ABORTED", StaleError),
        ("NOT_FOUND", NotFoundError),
        ("UNAVAILABLE", UnavailableError),
        ("CANCELLED", UnavailableError),
        ("RESOURCE_EXHAUSTED", BusyError),
        ("DEADLINE_EXCEEDED", DeadlineError),
        ("DATA_LOSS", TransferError),
        ("UNKNOWN", KvferryError),
    ],
)
@pytest.mark.parametrize("encoded", [None, b"\xff no json", b"[]"])
def test_a_status_without_a_readable_error_becomes_the_class_of_the_status(
    status: str, expected: type[KvferryError], encoded: bytes | None
) -> None:
    arrived = error_from_status(status, "gone", encoded)
    assert type(arrived) is expected
    assert (arrived.message, arrived.given) == ("gone", status)


def test_values_that_are_not_json_travel_as_text() -> None:
    arrived = error_from_status("NOT_FOUND", "", encode_error(NotFoundError("x", given=b"\x01")))
    assert arrived.given == "b'\\x01'"


def test_an_error_too_large_for_a_trailer_loses_its_values_not_its_delivery() -> None:
    encoded = encode_error(BadInputError("m" * 5000, given="x" * MAX_ERROR_BYTES))
    assert len(encoded) <= MAX_ERROR_BYTES
    arrived = error_from_status("INVALID_ARGUMENT", "", encoded)
    assert type(arrived) is BadInputError
    assert (arrived.message, arrived.given) == ("m" * 1024, None)
