"""Interrupts are held during clean-up, and handlers survive code that replaces them."""

import signal
import threading
from collections.abc import Iterator

import pytest

from kvferry.cluster.signals import handlers_kept, interrupts_held

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _known_handlers() -> Iterator[None]:
    """Where the tests run as a background job, SIGINT is ignored from the start."""
    before = [signal.getsignal(number) for number in NUMBERS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def test_an_interrupt_during_clean_up_does_not_cut_it_off() -> None:
    steps = []
    with interrupts_held():
        for number in NUMBERS:
            signal.raise_signal(number)
        steps.append("cleaned")
    assert steps == ["cleaned"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_back_after_code_that_replaced_them() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with handlers_kept():
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_other_threads_have_no_handlers_to_hold() -> None:
    done = threading.Event()

    def clean_up() -> None:
        with interrupts_held(), handlers_kept():
            done.set()

    thread = threading.Thread(target=clean_up)
    thread.start()
    thread.join(5)
    assert done.is_set()
