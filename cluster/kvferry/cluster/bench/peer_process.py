"""The other process of a benchmark, and the pipe to it."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from kvferry.proto.errors import DeadlineError, UnavailableError

ANSWER_TIMEOUT_S = 60.0


@contextmanager
def running_process(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    """Run `target(pipe, *args)` in a process of its own; yield our end of the pipe.

    It is killed afterwards.
    """
    # A fork would take gRPC along, which does not survive one.
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def answer_of(pipe: Connection) -> Any:
    """Return the next thing that the process says.

    Raises:
        DeadlineError: it says nothing for `ANSWER_TIMEOUT_S`.
        UnavailableError: it has ended; why is on stderr.
    """
    if not pipe.poll(ANSWER_TIMEOUT_S):
        raise DeadlineError("the peer process is silent", allowed=f"{ANSWER_TIMEOUT_S} s")
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        raise UnavailableError("the peer process has ended") from None
