import threading
import time

from kvferry.worker.stall_watch import StallWatch


def test_a_stream_on_which_nothing_moves_is_stopped_once() -> None:
    stops: list[float] = []
    started = time.monotonic()
    watch = StallWatch(lambda: stops.append(time.monotonic()), stall_s=0.1, poll_s=0.01)
    with watch:
        time.sleep(0.4)
    assert watch.stalled
    assert len(stops) == 1
    assert stops[0] - started > 0.1


def test_a_stream_that_moves_is_left_alone() -> None:
    stopped = threading.Event()
    with StallWatch(stopped.set, stall_s=2.0, poll_s=0.01) as watch:
        for _ in range(8):
            time.sleep(0.35)
            watch.moved()
    assert not stopped.is_set()
    assert not watch.stalled


def test_a_cancel_stops_the_stream_without_calling_it_stalled() -> None:
    stopped, cancel = threading.Event(), threading.Event()
    watch = StallWatch(stopped.set, stall_s=60.0, poll_s=0.01, cancel=cancel)
    with watch:
        cancel.set()
        assert stopped.wait(5.0)
    assert not watch.stalled


def test_a_stream_that_moves_beyond_its_deadline_is_stopped_then() -> None:
    stopped = threading.Event()
    started_s = time.monotonic()
    end_s = started_s + 0.2
    with StallWatch(stopped.set, stall_s=60.0, poll_s=0.01, end_s=end_s) as watch:
        while not stopped.wait(0.01):
            assert time.monotonic() < end_s + 5.0
            watch.moved()
        assert time.monotonic() > end_s
    assert watch.is_late
    assert not watch.stalled
