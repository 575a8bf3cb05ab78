"""Brings back instances that have died, however often and however long it takes.

When is decided by `Attempts`, which is pure; how is the business of whoever makes instances.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvferry.cluster.serving.legs import EngineLink
from kvferry.proto.errors import InstanceDrainedError, KvferryError
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

Leave = Callable[[InstanceId], bool]
"""Ends what is left of a drained life and gives its place back; tells whether the next one is to
start elsewhere, as its node is being taken away. Blocks."""

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
        leave: ends what was drained; called in a thread of its own.
        join: is given the next life.
    """

    def __init__(self, start_again: StartAgain, leave: Leave, join: Join) -> None:
        self._start_again = start_again
        self._leave = leave
        self._join = join
        self._attempts: dict[InstanceId, Attempts] = {}
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._drained: set[InstanceId] = set()
        self._closing = threading.Event()

    def died(self, instance_id: InstanceId, error: KvferryError) -> None:
        """Bring an instance back, unless that is under way already.

        One that was drained comes back only if its node is being taken away.
        """
        if self._closing.is_set() or instance_id in self._tasks or instance_id in self._drained:
            return
        if isinstance(error, InstanceDrainedError):
            # Other routers hear of the end of its processes only later.
            self._drained.add(instance_id)
            work = self._after_drain(instance_id, error)
        else:
            log.warning("instance %s is started again: %s", instance_id, error)
            work = self._bring_back(instance_id)
        self._tasks[instance_id] = asyncio.create_task(work)

    async def close(self) -> None:
        """Bring nobody back any more, and wait until that is so."""
        self._closing.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _after_drain(self, instance_id: InstanceId, error: KvferryError) -> None:
        try:
            belongs_elsewhere = await _in_thread(lambda: self._leave(instance_id))
        except Exception as unknown:  # Ray's errors are many, and without it nothing is lost
            log.warning("the place of instance %s is not given back: %s", instance_id, unknown)
            belongs_elsewhere = False
        if not belongs_elsewhere:
            log.warning("instance %s is not started again: %s", instance_id, error)
            del self._tasks[instance_id]
            return
        log.warning("instance %s is started again elsewhere: %s", instance_id, error)
        await self._bring_back(instance_id)

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
            self._drained.discard(instance_id)
            self._join(instance_id, link)
            return


_T = TypeVar("_T")


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Return what `work` does, also after this task was cancelled: it must not go on alone."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
