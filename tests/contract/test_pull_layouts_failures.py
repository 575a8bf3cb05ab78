"""Pulling from an instance of another layout when a rank, a block or the caller is gone."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.exchange import SHAPE, exchanging
from tests.tampering import Messages, corrupted
from tests.unit.worker.reshard_by_loops import identity_of

from kvferry.proto.errors import MismatchError
from kvferry.proto.layout import Layout, grid
from kvferry.worker import chunks
from kvferry.worker.frames import Frame
from kvferry.worker.pull import CANCELLED, merge_outcomes
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import make_fetch_ask

STAGE = (SHAPE.num_layers,)
CHUNK_TOKENS = 10
"""Of all four heads; of fewer heads a chunk has more tokens."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few tokens, so that a transfer has several."""
    token_bytes = 2 * SHAPE.num_kv_heads * SHAPE.head_bytes
    monkeypatch.setattr(chunks, "CHUNK_PAGE_BYTES", CHUNK_TOKENS * token_bytes)


# Failures. Two ranks that hold every other token, and one that takes all; or two that hold half
# the heads each.
DEALT = grid(block_tokens=4, dcp=2, stage_layers=STAGE)
ONE = grid(block_tokens=16, stage_layers=STAGE)
CUT = grid(block_tokens=4, tp=2, stage_layers=STAGE)
CUT_TOO = grid(block_tokens=16, tp=2, stage_layers=STAGE)


def test_of_a_source_rank_that_is_gone_nobody_counts_a_block() -> None:
    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        exchange.senders[1].stop()
        outcome = exchange.pull(0)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "UnavailableError")
        assert outcome.error is not None
        assert exchange.addresses[1] in outcome.error
        # What rank 0 sent are parts of blocks.
        assert outcome.num_bytes == exchange.plan.transfers[0].num_bytes
        exchange.assert_holds(0, 0, only=False)


def test_ranks_that_did_not_need_the_one_that_is_gone_have_their_blocks() -> None:
    with exchanging(CUT, CUT_TOO, num_blocks=5) as exchange:
        exchange.senders[1].stop()
        outcomes = exchange.pull_all()
        assert [one.num_blocks_of_run for one in outcomes] == [(5,), (0,)]
        exchange.assert_holds(0, 5)
        exchange.assert_holds(1, 0)
        merged = merge_outcomes(outcomes)
        assert (merged.num_blocks_of_run, merged.error_type) == ((0,), "UnavailableError")


def test_after_a_transfer_that_failed_nobody_else_is_called() -> None:
    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        exchange.senders[0].stop()
        assert exchange.pull(0).num_blocks_of_run == (0,)
        assert exchange.senders[1].stats().of("served").num_started == 0
        exchange.assert_holds(0, 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("num_blocks", "at_once"), [(0, False), (2, False), (2, True)])
def test_a_block_that_leaves_its_place_at_one_rank_ends_the_prefix_of_whole_blocks(
    rank: int, num_blocks: int, *, at_once: bool
) -> None:
    # Tokens of a source rank come in chunks of 10. Its block 7 begins with the 29th, so two chunks
    # arrive: positions up to 39, of which two blocks of 16 are whole. Its block 2 has the 10th
    # token, so nothing does.
    lost = 7 if num_blocks else 2

    def lose(_: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        exchange.lose(rank, lost)
        yield from messages

    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        if at_once:
            exchange.lose(rank, lost)
        else:
            exchange.senders[rank].tamper = lose
        outcome = exchange.pull(0)
        assert outcome.num_blocks_of_run == (num_blocks,)
        # The other rank is asked all the same, before or after.
        assert [one.stats().of("served").num_started for one in exchange.senders] == [1, 1]
        assert (outcome.error_type, outcome.num_checksum_failures) == ("NotFoundError", 0)
        exchange.assert_holds(0, num_blocks, only=False)


def test_a_block_lost_at_one_rank_shortens_only_the_ranks_that_take_from_it() -> None:
    with exchanging(CUT, CUT_TOO, num_blocks=5) as exchange:
        exchange.lose(1, 13)
        outcomes = exchange.pull_all()
        # 13 blocks of 4 are 52 tokens; of two heads a chunk has 20, and 40 tokens are 2 blocks.
        assert [one.num_blocks_of_run for one in outcomes] == [(5,), (2,)]
        assert merge_outcomes(outcomes).num_blocks_of_run == (2,)
        exchange.assert_holds(0, 5)
        exchange.assert_holds(1, 2, only=False)


def test_ranks_that_share_tokens_count_the_blocks_that_each_of_them_has() -> None:
    dealt_too = grid(block_tokens=8, dcp=2, interleave=4, stage_layers=STAGE)
    with exchanging(grid(block_tokens=4, stage_layers=STAGE), dealt_too, num_blocks=5) as exchange:
        exchange.lose(0, 13)
        # Of 52 positions rank 0 takes 28 and rank 1 takes 24; each has two chunks of 10 of them,
        # which are two of its blocks of 8.
        assert [one.num_blocks_of_run for one in exchange.pull_all()] == [(2,), (2,)]
        for rank in range(2):
            exchange.assert_holds(rank, 2, only=False)


def test_with_one_layout_a_lost_block_ends_the_prefix_where_it_was() -> None:
    with exchanging(DEALT, DEALT, num_blocks=5) as exchange:
        exchange.lose(1, 3)
        outcomes = exchange.pull_all()
        assert [one.num_blocks_of_run for one in outcomes] == [(5,), (3,)]
        for rank, num_blocks in enumerate((5, 3)):
            exchange.assert_holds(rank, num_blocks)


def test_a_load_that_fails_ends_the_pull_and_those_before_it_are_whole() -> None:
    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        exchange.lose(1, 4)
        # Blocks 0 and 1 of 16 tokens need source blocks 0 to 3 of 8, block 2 needs 4 and 5.
        outcome = exchange.pull(0, [exchange.load(*ends) for ends in ((0, 2), (2, 3), (3, 5))])
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((2, 0, 0), "NotFoundError")
        assert [one.stats().of("served").num_started for one in exchange.senders] == [2, 2]
        exchange.assert_holds(0, 2, only=False)


def test_a_corrupt_frame_is_refused_counted_and_no_block_of_it_is_resident() -> None:
    def corrupt(_: WorkerService, messages: Messages) -> Messages:
        for number, message in enumerate(messages):
            if isinstance(message, Frame) and number == 1:
                yield corrupted(message)
            else:
                yield message

    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        exchange.senders[1].tamper = corrupt
        outcome = exchange.pull(0)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "TransferError")
        assert outcome.num_checksum_failures == 1
        assert exchange.takers[0].stats().num_checksum_failures == 1
        exchange.assert_holds(0, 0, only=False)


def test_a_pull_that_is_cancelled_before_it_begins_calls_nobody() -> None:
    cancel = threading.Event()
    cancel.set()
    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        outcome = exchange.pull(0, cancel=cancel)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), CANCELLED)
        assert [one.stats().of("served").num_started for one in exchange.senders] == [0, 0]
        exchange.assert_holds(0, 0)


def test_a_pull_that_is_cancelled_at_its_last_rank_ends_and_nothing_counts() -> None:
    cancel = threading.Event()

    def cancel_first(_: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        cancel.set()
        yield from messages

    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        exchange.senders[1].tamper = cancel_first
        outcome = exchange.pull(0, cancel=cancel)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), CANCELLED)
        assert outcome.num_bytes == exchange.plan.transfers[0].num_bytes
        exchange.assert_holds(0, 0, only=False)


@pytest.fixture
def hang() -> Iterator[Any]:
    """Makes a source rank send its header and then nothing, until the test is over."""
    over = threading.Event()

    def silent(_: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        over.wait(20.0)

    yield silent
    over.set()


def test_a_pull_ends_at_its_deadline_whatever_rank_is_silent(hang: Any) -> None:
    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        exchange.senders[1].tamper = hang
        outcome = exchange.pull(0, timeout_s=0.5)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "DeadlineError")
        assert outcome.num_bytes == exchange.plan.transfers[0].num_bytes
        exchange.assert_holds(0, 0, only=False)


@pytest.mark.parametrize("destination", [ONE, DEALT])
def test_without_time_left_nothing_is_pulled(destination: Layout) -> None:
    with exchanging(DEALT, destination, num_blocks=5) as exchange:
        outcome = exchange.pull(0, timeout_s=0.0)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "DeadlineError")
        exchange.assert_holds(0, 0)


def test_ranks_in_another_life_send_nothing() -> None:
    with exchanging(DEALT, ONE, num_blocks=5) as exchange:
        outcome = exchange.pull(0, incarnation=2)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "StaleError")
        exchange.assert_holds(0, 0)


def test_ranks_of_another_identity_send_nothing_and_the_difference_is_named() -> None:
    theirs = replace(SHAPE, head_size=4)
    with exchanging(DEALT, ONE, num_blocks=5, theirs=theirs) as exchange:
        outcome = exchange.pull(0)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "IdentityMismatchError")
        assert outcome.error is not None
        assert "head_size" in outcome.error
        exchange.assert_holds(0, 0)


def test_ranks_that_are_taken_for_those_of_another_layout_send_nothing() -> None:
    # Their blocks are cut alike, and the hashes are the same.
    with exchanging(DEALT, ONE, num_blocks=2) as exchange:
        exchange.source = replace(DEALT, interleave=2)
        outcome = exchange.pull(0)
        assert (outcome.num_blocks_of_run, outcome.num_bytes) == ((0,), 0)
        assert outcome.error_type == "MismatchError"
        assert outcome.error is not None
        assert "interleave=2" in outcome.error


@pytest.mark.parametrize("destination", [ONE, DEALT])
def test_a_rank_that_is_taken_for_another_one_sends_nothing(destination: Layout) -> None:
    with exchanging(DEALT, destination, num_blocks=2) as exchange:
        exchange.addresses.reverse()
        outcome = exchange.pull(0)
        assert (outcome.num_blocks_of_run, outcome.num_bytes) == ((0,), 0)
        assert outcome.error_type == "MismatchError"


def test_who_says_no_layout_is_served_by_an_instance_of_one_rank_only() -> None:
    with exchanging(ONE, ONE, num_blocks=1) as exchange:
        ask = make_fetch_ask(identity_of(SHAPE), exchange.chain[:1])
        assert next(exchange.senders[0].open_fetch(ask))
    with exchanging(CUT, ONE, num_blocks=1) as exchange, pytest.raises(MismatchError):
        next(exchange.senders[0].open_fetch(ask))
