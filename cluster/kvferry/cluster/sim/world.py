"""Virtual time, and the tasks that live in it: one runs at a time, and one seed decides which.

A task is a greenlet: code that blocks (`World.block`) gives way to others in the middle of whatever
called it, so the real services run as they are. Time passes only when nobody can run.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from greenlet import greenlet

from kvferry.proto.errors import InvariantError


@dataclass(eq=False, slots=True)
class Process:
    """What dies, pauses and tells time together. `clock_rate` seconds pass here in one second."""

    name: str
    clock_offset_s: float = 0.0
    clock_rate: float = 1.0
    is_alive: bool = True
    paused_until_s: float = 0.0
    at_end: list[Callable[[], None]] = field(default_factory=list)


class Task:
    """A greenlet of a process; `waking` tells the wake-up that it waits for from earlier ones."""

    __slots__ = ("greenlet", "process", "waking", "woken")

    def __init__(self, process: Process) -> None:
        self.process = process
        self.waking = 0
        self.woken = False
        self.greenlet: greenlet


class World:
    """Runs tasks until nothing is left to do, or for a number of steps.

    A step is one time that a task gets to run, until it blocks or ends. Of those that could run at
    the same moment, chance takes one.

    Args:
        seed: of everything that is left to chance.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.num_steps = 0
        self.failure: BaseException | None = None
        self.after_step: Callable[[Task], None] = lambda _: None
        self._hub = greenlet.getcurrent()
        self._current: Task | None = None
        self._outside = Process("outside")
        self._queue: list[tuple[float, float, int, Task, int, bool]] = []
        self._num_queued = 0
        # A greenlet that is collected is ended by an exception in it: the dead must not speak.
        self._all: list[Task] = []

    # --- seen from a task --------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """The process of the task that runs."""
        return self._outside if self._current is None else self._current.process

    def clock_s(self) -> float:
        """Return the time as the running task's process tells it."""
        process = self.process
        return process.clock_offset_s + process.clock_rate * self.now_s

    def block(self, timeout_s: float | None) -> bool:
        """Give way until `wake` is called for this task, or the time is over; tell which."""
        task = self.current_task()
        task.woken = False
        if timeout_s is not None:
            self._schedule(task, self.now_s + max(timeout_s, 0.0), woken=False)
        self._hub.switch()
        return task.woken

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.block(seconds)

    def current_task(self) -> Task:
        """Return the task that runs.

        Raises:
            InvariantError: none does.
        """
        if self._current is None:
            raise InvariantError("something blocks outside of all tasks")
        return self._current

    def is_later_than(self, time_s: float) -> bool:
        """Tell whether some moment is over."""
        return self.now_s > time_s

    # --- seen from anywhere ------------------------------------------------------------------

    def wake(self, task: Task) -> None:
        """Let a blocked task run again, now."""
        self._schedule(task, self.now_s, woken=True)

    def spawn(
        self, work: Callable[[], object], process: Process | None = None, *, after_s: float = 0.0
    ) -> Task:
        """Start a task of a process (that of the caller)."""
        task = Task(self.process if process is None else process)
        task.greenlet = greenlet(lambda: self._run_task(work), parent=self._hub)
        self._all.append(task)
        self._schedule(task, self.now_s + after_s, woken=True)
        return task

    def kill(self, process: Process) -> None:
        """End a process where it stands: none of its tasks runs again."""
        process.is_alive = False
        ends, process.at_end = process.at_end, []
        for end in ends:
            end()

    def pause(self, process: Process, seconds: float) -> None:
        """Freeze a process: its tasks go on later, as if nothing had been."""
        process.paused_until_s = max(process.paused_until_s, self.now_s + seconds)

    def run(self, num_steps: int | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Run up to `num_steps` steps, or until something holds, or nothing is left to do.

        Raises:
            BaseException: the first that a task did not handle.
        """
        end = None if num_steps is None else self.num_steps + num_steps
        while self._queue and self.failure is None and not until():
            if end is not None and self.num_steps >= end:
                break
            self._step()
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Exception) -> None:
        """Let `run` end with an error that whoever met it may not tell."""
        self.failure = self.failure or failure

    def _step(self) -> None:
        at_s, _, _, task, waking, woken = heapq.heappop(self._queue)
        if waking != task.waking or not task.process.is_alive:
            return
        self.now_s = max(self.now_s, at_s)
        if task.process.paused_until_s > self.now_s:
            self._push(task.process.paused_until_s, task, waking, woken=woken)
            return
        self.num_steps += 1
        task.waking += 1
        task.woken = woken
        self._current = task
        task.greenlet.switch()
        self._current = None
        if self.failure is None:
            self.after_step(task)

    def _run_task(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.fail(error)

    def _schedule(self, task: Task, at_s: float, *, woken: bool) -> None:
        self._push(at_s, task, task.waking, woken=woken)

    def _push(self, at_s: float, task: Task, waking: int, *, woken: bool) -> None:
        self._num_queued += 1
        entry = (at_s, self.random.random(), self._num_queued, task, waking, woken)
        heapq.heappush(self._queue, entry)
