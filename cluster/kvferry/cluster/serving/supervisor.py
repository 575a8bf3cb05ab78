"""Brings back instances that have died, however often and however long it takes.

When is decided by `Attempts`, which is pure; how is the business of whoever makes instances.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cluster.serving.legs import EngineLink
from kvferry.proto.ids import InstanceId

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Between attempts to start an instance; each pause is twice the one before."""

SETTLED_AFTER_S = 60.0
"""An instance that has lived for so long is started again at once when it dies."""

log = logging.getLogger(__name__)

StartAgain = Callable[[InstanceId, threading.Event], EngineLink]
"""Starts the next life of an instance that is dead, or nearly so, and returns it when it serves.

Blocks, and gives up soon after the event has been set. Raises whatever went wrong.
"""

Join = Callable[[InstanceId, EngineLink], None]
"""Lets requests be sent to an instance; called in the event loop."""


@dataclass(slots=True)
class Attempts:
    """How long to wait before an instance is started again; all in seconds."""

    _num_failures: int = 0
    _began_s: float | None = None

    def died(self, now_s: float) -> float:
        """Return the pause before the first attempt after a death."""
        if self._began_s is None or now_s - self._began_s >= SETTLED_AFTER_S:
            self._num_failures = 0
            return 0.0
        return self.failed()

    def failed(self) -> float:
        """Return the pause after an attempt that failed."""
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_failures, LONGEST_PAUSE_S)
        self._num_failures += 1
        return pause_s

    def succeeded(self, now_s: float) -> None:
        """Take note that the instance lives."""
        self._began_s = now_s


class Supervisor:
    """Works in an event loop, from the first death it is told of until it is closed.

    Args:
        start_again: makes the next life; called in a thread of its own.
        join: is given it.
    """

    def __init__(self, start_again: StartAgain, join: Join) -> None:
        self._start_again = start_again
        self._join = join
        self._attempts: dict[InstanceId, Attempts] = {}
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._closing = threading.Event()

    def died(self, instance_id: InstanceId, reason: str) -> None:
        """Bring an instance back, unless that is under way already."""
        if self._closing.is_set() or instance_id in self._tasks:
            return
        log.warning("instance %s is started again: %s", instance_id, reason)
        self._tasks[instance_id] = asyncio.create_task(self._bring_back(instance_id))

    async def close(self) -> None:
        """Bring nobody back any more, and wait until that is so."""
        self._closing.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring_back(self, instance_id: InstanceId) -> None:
        attempts = self._attempts.setdefault(instance_id, Attempts())
        pause_s = attempts.died(time.monotonic())
        while True:
            await asyncio.sleep(pause_s)
            try:
                link = await _in_thread(lambda: self._start_again(instance_id, self._closing))
            except Exception as error:  # whatever it is, nobody else would try once more
                pause_s = attempts.failed()
                log.warning(
                    "instance %s could not be started again, next attempt in %g s: %s",
                    instance_id,
                    pause_s,
                    error,
                )
                continue
            attempts.succeeded(time.monotonic())
            log.warning("instance %s is back", instance_id)
            # From here on its next death may be reported.
            del self._tasks[instance_id]
            self._join(instance_id, link)
            return


async def _in_thread(work: Callable[[], EngineLink]) -> EngineLink:
    """Return what `work` does, also after this task was cancelled: it must not go on alone."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
