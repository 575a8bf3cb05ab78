"""News of an engine between its loop and the router."""

import threading
import time

import pytest

from kvferry.cluster.serving.outbox import Outbox
from kvferry.cluster.serving.requests import Output
from kvferry.proto.errors import InstanceDiedError
from kvferry.proto.ids import InstanceId, RequestId


def news(token: int) -> Output:
    return Output(request_id=RequestId("r"), token_ids=(token,))


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(InstanceId("d0"))


def tokens(outbox: Outbox, since: int) -> list[int]:
    return [output.token_ids[0] for output in outbox.take(since, 0).outputs]


def test_news_is_kept_until_a_later_number_is_asked_for(outbox: Outbox) -> None:
    outbox.put((news(1), news(2)))
    assert tokens(outbox, 0) == [1, 2]
    assert tokens(outbox, 0) == [1, 2]
    outbox.put((news(3),))
    assert tokens(outbox, 2) == [3]
    assert outbox.take(2, 0).next_seq == 3
    assert tokens(outbox, 3) == []


def test_a_wait_ends_with_the_first_news(outbox: Outbox) -> None:
    threading.Timer(0.05, outbox.put, [(news(7),)]).start()
    started = time.monotonic()
    assert outbox.take(0, 5.0).outputs == (news(7),)
    assert time.monotonic() - started < 2


def test_a_wait_without_news_ends_empty(outbox: Outbox) -> None:
    assert outbox.take(0, 0.01).outputs == ()


def test_a_failed_loop_is_told_after_its_last_news(outbox: Outbox) -> None:
    outbox.put((news(1),))
    outbox.fail("out of memory")
    assert tokens(outbox, 0) == [1]
    with pytest.raises(InstanceDiedError, match=r"d0.*out of memory"):
        outbox.take(1, 5.0)
    with pytest.raises(InstanceDiedError):
        outbox.require_alive()


def test_a_failure_is_told_from_what_the_loop_met(outbox: Outbox) -> None:
    cause = KeyError("r")
    outbox.fail("KeyError", cause=cause)
    with pytest.raises(InstanceDiedError) as death:
        outbox.require_alive()
    assert death.value.__cause__ is cause
