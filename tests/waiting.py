"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.005)
