"""Counting transfers: what they moved, how long they took, how they ended."""

import pickle
from collections.abc import Generator

import pytest

from kvferry.proto.errors import TransferError
from kvferry.worker.stats import StatsCounter, TransferCounts


def counts(**values: object) -> TransferCounts:
    return TransferCounts(**values)  # type: ignore[arg-type]


def test_every_direction_and_path_is_there_from_the_start() -> None:
    transfers = StatsCounter().read().transfers
    assert set(transfers) == {
        (direction, path)
        for direction in ("served", "pulled", "stored", "taken")
        for path in ("grpc", "bulk", "shm")
    }
    assert set(map(repr, transfers.values())) == {repr(TransferCounts())}


def test_a_transfer_is_in_progress_until_its_end_and_timed_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, clock = StatsCounter(), iter([10.0, 10.25])
    monkeypatch.setattr("kvferry.worker.stats.time.monotonic", lambda: next(clock))
    with counter.transfer("pulled") as counted:
        counted.over("shm")
        counted.moved(100)
        counted.moved(28)
        during = counter.read()
    assert during.transfers["pulled", "shm"] == counts(
        num_started=1, num_in_progress=1, num_bytes=128
    )
    assert counter.read().transfers["pulled", "shm"] == counts(
        num_started=1, num_bytes=128, seconds=0.25
    )
    assert counter.read().transfers["pulled", "grpc"] == TransferCounts()


def test_failures_are_counted_by_reason() -> None:
    counter = StatsCounter()
    for _ in range(2):
        with pytest.raises(TransferError), counter.transfer("stored"):
            raise TransferError("a frame's checksum is wrong")
    with counter.transfer("stored") as counted:
        counted.failed("Cancelled")
    failures = counter.read().of("stored").failures
    assert failures == {"TransferError": 2, "Cancelled": 1}


@pytest.mark.parametrize(("is_whole", "failures"), [(False, {"Cancelled": 1}), (True, {})])
def test_the_other_side_may_leave_once_everything_was_sent_and_no_sooner(
    is_whole: bool, failures: dict[str, int]
) -> None:
    counter = StatsCounter()

    def serve() -> Generator[None, None, None]:
        with counter.transfer("served") as counted:
            counted.is_whole = is_whole
            yield

    serving = serve()
    next(serving)
    assert counter.read().of("served").num_in_progress == 1
    serving.close()
    served = counter.read().of("served")
    assert (served.num_in_progress, served.failures) == (0, failures)


def test_the_reason_that_was_told_goes_before_the_error() -> None:
    counter = StatsCounter()

    def pull() -> None:
        with counter.transfer("pulled") as counted:
            counted.failed("Cancelled")
            raise TransferError("the connection is gone")

    with pytest.raises(TransferError):
        pull()
    assert counter.read().of("pulled").failures == {"Cancelled": 1}


def test_a_direction_is_summed_over_its_paths() -> None:
    counter = StatsCounter()
    with counter.transfer("served") as counted:
        counted.moved(1)
    with counter.transfer("served") as counted:
        counted.over("bulk")
        counted.moved(2)
        counted.failed("DeadlineError")
    with counter.transfer("pulled") as counted:
        counted.moved(4)
    summed = counter.read().of("served")
    assert (summed.num_started, summed.num_bytes) == (2, 3)
    assert summed.failures == {"DeadlineError": 1}
    assert summed.seconds >= 0.0


def test_statistics_survive_pickling_and_do_not_change_later() -> None:
    counter = StatsCounter()
    counter.add(num_blocks_pulled=3, num_checksum_failures=1)
    before = counter.read()
    with counter.transfer("served") as counted:
        counted.failed("StaleError")
    assert before.of("served") == TransferCounts()
    assert (before.num_blocks_pulled, before.num_checksum_failures) == (3, 1)
    after = counter.read()
    assert pickle.loads(pickle.dumps(after)) == after
