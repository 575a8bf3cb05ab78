"""Progress of a command: lines on stderr with the seconds since it began."""

import time
from collections.abc import Callable

from rich.console import Console

Progress = Callable[[str], None]


def stderr_progress() -> Progress:
    """Return what prints a line with the seconds since this call."""
    started = time.monotonic()
    err = Console(stderr=True, highlight=False, soft_wrap=True)

    def progress(line: str) -> None:
        err.print(f"{time.monotonic() - started:6.1f} s  {line}", markup=False)

    return progress
