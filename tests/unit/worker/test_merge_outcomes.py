"""One outcome of a pull by several ranks."""

from dataclasses import replace

import pytest

from kvferry.worker.pull import CANCELLED, PullOutcome, merge_outcomes

WHOLE = PullOutcome(num_blocks_of_run=(5, 3), num_bytes=100)
REFUSED = PullOutcome(
    num_blocks_of_run=(5, 1),
    num_bytes=60,
    num_checksum_failures=1,
    error="corrupt",
    error_type="TransferError",
)
GONE = PullOutcome(
    num_blocks_of_run=(2, 0), num_bytes=20, error="no answer", error_type="UnavailableError"
)
STOPPED = PullOutcome(
    num_blocks_of_run=(4, 0), num_bytes=40, error="cancelled", error_type=CANCELLED
)


def test_one_rank_s_outcome_is_its_own() -> None:
    for outcome in (WHOLE, REFUSED, STOPPED):
        assert replace(merge_outcomes([outcome]), failed_block=0) == outcome


def test_without_errors_all_blocks_count_and_all_bytes() -> None:
    assert merge_outcomes([WHOLE, WHOLE]) == PullOutcome(num_blocks_of_run=(5, 3), num_bytes=200)


def test_of_every_run_the_blocks_count_that_all_ranks_have() -> None:
    longer = PullOutcome(num_blocks_of_run=(1, 9), num_bytes=7)
    assert merge_outcomes([WHOLE, longer]).num_blocks_of_run == (1, 3)


@pytest.mark.parametrize(
    ("outcomes", "error", "error_type"),
    [
        ([WHOLE, REFUSED], "corrupt", "TransferError"),
        ([REFUSED, GONE], "corrupt", "TransferError"),
        ([GONE, REFUSED], "no answer", "UnavailableError"),
        # Whoever was told to stop does not know why.
        ([STOPPED, WHOLE, GONE], "no answer", "UnavailableError"),
        ([STOPPED, WHOLE], "cancelled", CANCELLED),
    ],
)
def test_the_error_is_that_of_the_first_rank_that_was_not_told_to_stop(
    outcomes: list[PullOutcome], error: str, error_type: str
) -> None:
    merged = merge_outcomes(outcomes)
    assert (merged.error, merged.error_type) == (error, error_type)


@pytest.mark.parametrize(
    ("outcomes", "failed_block"), [([REFUSED], 6), ([GONE, REFUSED], 2), ([STOPPED, REFUSED], 6)]
)
def test_the_failed_block_is_the_first_that_the_failed_rank_lacks(
    outcomes: list[PullOutcome], failed_block: int
) -> None:
    # The one that was told to stop has less, and nobody says that its next block is gone.
    assert merge_outcomes(outcomes).failed_block == failed_block


def test_bytes_and_checksum_failures_of_all_ranks_add_up() -> None:
    merged = merge_outcomes([REFUSED, GONE, REFUSED])
    assert (merged.num_bytes, merged.num_checksum_failures) == (140, 2)
    assert merged.num_blocks_of_run == (2, 0)


def test_ranks_that_pulled_other_numbers_of_runs_are_not_merged() -> None:
    with pytest.raises(ValueError, match="zip"):
        merge_outcomes([WHOLE, PullOutcome(num_blocks_of_run=(1,), num_bytes=1)])
