import logging
from typing import Any

import grpc
import pytest

from kvferry.proto.errors import InvariantError
from kvferry.proto.grpc_status import ERROR_METADATA_KEY, error_from_status
from kvferry.worker.grpc_errors import abort_with


class FakeContext:
    """A call whose peer is there, or has left."""

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self.trailer: dict[str, bytes] = {}

    def is_active(self) -> bool:
        return self._is_active

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.trailer = dict(metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise ConnectionAbortedError(code.name, details)


def aborted(error: Exception, context: FakeContext) -> tuple[Any, ...]:
    any_context: Any = context
    with pytest.raises(ConnectionAbortedError) as caught:
        abort_with(any_context, error)
    return caught.value.args


def test_a_peer_that_leaves_is_told_apart_from_a_bug_and_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    left = aborted(grpc.RpcError(), FakeContext(is_active=False))
    assert left == ("CANCELLED", "the peer has left")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("DEBUG", "a peer left a transfer: ipv4:127.0.0.1:5")
    ]


@pytest.mark.parametrize(
    ("error", "is_active"), [(ZeroDivisionError("oops"), False), (grpc.RpcError("oops"), True)]
)
def test_a_bug_is_an_error_in_the_log_whether_the_peer_is_there_or_not(
    error: Exception, is_active: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context = FakeContext(is_active=is_active)
    told = aborted(error, context)
    given = f"{type(error).__name__}: oops"
    assert told == ("INTERNAL", f"the worker failed; given: {given}")
    arrived = error_from_status("INTERNAL", "", context.trailer[ERROR_METADATA_KEY])
    assert (type(arrived), arrived.message, arrived.given) == (
        InvariantError,
        "the worker failed",
        given,
    )
    assert [one.levelname for one in caplog.records] == ["ERROR"]
