"""Known failures of single transfers, each as a test over real gRPC; the number names the case."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.exchange import Exchange, exchanging
from tests.tampering import Messages

from kvferry.proto.layout import grid
from kvferry.worker import bulk_server
from kvferry.worker.paths import Path
from kvferry.worker.pull import merge_outcomes
from kvferry.worker.service import WorkerService

# A transfer of three parts: every block has layers on three ranks of its source.
IN_THREE_PARTS = grid(block_tokens=4, pp=3, stage_layers=(2, 1, 1))
ONE = grid(block_tokens=4, stage_layers=(4,))
TWO_SHARDS = grid(block_tokens=4, tp=2, stage_layers=(4,))
NUM_BLOCKS = 3


@pytest.fixture(params=[(), ("bulk",)], ids=["grpc", "bulk"])
def three_parts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Exchange]:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    paths: tuple[Path, ...] = request.param
    with exchanging(IN_THREE_PARTS, ONE, num_blocks=NUM_BLOCKS, paths=paths) as exchange:
        yield exchange


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is over: who waits for it is silent until then."""
    event = threading.Event()
    yield event
    event.set()


def require_failed_once(exchange: Exchange, error_type: str) -> None:
    """Nothing is addressable, although the first part came; it was told once, and nothing waits."""
    assert exchange.takers[0].stats().of("pulled").failures == {error_type: 1}
    assert exchange.takers[0].stats().of("pulled").num_bytes == exchange.plan.transfers[0].num_bytes
    exchange.assert_holds(0, 0, only=False)


# -- B34: one part of a transfer fails, cannot begin, or never ends --------------------------------


def test_b34a_a_part_whose_state_cannot_be_told_fails_the_transfer_once_and_says_why(
    three_parts: Exchange,
) -> None:
    def broken(_: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        raise ZeroDivisionError("the poll failed")

    three_parts.senders[1].tamper = broken
    outcome = three_parts.pull(0)
    assert outcome.num_blocks_of_run == (0,)
    assert outcome.error is not None
    assert "ZeroDivisionError: the poll failed" in outcome.error
    assert outcome.error_type is not None
    require_failed_once(three_parts, outcome.error_type)
    # What the failed one held is free: the same transfer goes through when nothing fails.
    three_parts.senders[1].tamper = None
    assert three_parts.pull(0).num_blocks_of_run == (NUM_BLOCKS,)
    three_parts.assert_holds(0, NUM_BLOCKS)


def test_b34b_a_part_that_cannot_be_started_fails_the_transfer_at_once(
    three_parts: Exchange,
) -> None:
    three_parts.senders[1].stop()
    outcome = three_parts.pull(0, timeout_s=10.0)
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "UnavailableError")
    assert outcome.error is not None
    assert three_parts.addresses[1] in outcome.error
    require_failed_once(three_parts, "UnavailableError")


def test_b34c_a_part_that_never_ends_fails_the_transfer_at_the_deadline(
    three_parts: Exchange, over: threading.Event
) -> None:
    def silent(_: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        over.wait(20.0)

    three_parts.senders[1].tamper = silent
    outcome = three_parts.pull(0, timeout_s=0.5)
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "DeadlineError")
    require_failed_once(three_parts, "DeadlineError")


def test_b34d_what_has_arrived_whole_counts_although_its_end_is_not_seen_by_the_deadline(
    three_parts: Exchange, over: threading.Event
) -> None:
    """Nobody waits for the end of a transfer of which every byte is in place."""

    def endless(_: WorkerService, messages: Messages) -> Messages:
        yield from messages
        over.wait(20.0)

    for sender in three_parts.senders:
        sender.tamper = endless
    outcome = three_parts.pull(0, timeout_s=5.0)
    assert (outcome.num_blocks_of_run, outcome.error) == ((NUM_BLOCKS,), None)
    three_parts.assert_holds(0, NUM_BLOCKS)


# -- B37: shards that would disagree on what was delivered -----------------------------------------


def test_b37c_a_block_that_one_shard_lost_after_the_lookup_counts_on_neither() -> None:
    with exchanging(TWO_SHARDS, TWO_SHARDS, num_blocks=NUM_BLOCKS) as exchange:
        exchange.lose(1, 2)
        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(exchange.pull, range(2)))
        assert [outcome.num_blocks_of_run for outcome in outcomes] == [(3,), (2,)]
        both = merge_outcomes(outcomes)
        assert (both.num_blocks_of_run, both.error_type) == ((2,), "NotFoundError")
