"""Interrupts during clean-up: it is short, and cut off it would leave processes behind."""

import contextlib
import signal
import threading
from collections.abc import Iterator

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM inside, and put the handlers back in place after.

    Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers of SIGINT and SIGTERM back after code that replaces them."""
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
