"""What `threading`, `time` and executors are in the simulator, and which modules get that.

Only what the simulated modules use is here. One task runs at a time and gives way only where it
blocks, so locks have nothing to do.
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvferry.cluster.sim.world import Task, World

MODULES = (
    "kvferry.cluster.serving.all_ranks",
    "kvferry.cluster.serving.engine",
    "kvferry.cluster.serving.membership",
    "kvferry.cluster.serving.move_pulls",
    "kvferry.cluster.serving.outbox",
    "kvferry.cluster.serving.pulse",
    "kvferry.cluster.serving.rank",
    "kvferry.cluster.serving.legs",
    "kvferry.cluster.serving.router",
    "kvferry.cluster.store_watch",
    "kvferry.coordinator.actor",
    "kvferry.worker.busy_source",
    "kvferry.worker.coordinator_reserver",
    "kvferry.worker.device",
    "kvferry.worker.fetch_terms",
    "kvferry.worker.layout_pull",
    "kvferry.worker.residency",
    "kvferry.worker.stats",
    "kvferry.worker.store_moves",
)
"""Those of the simulated code that block, start something, look at a clock, or open a file."""


class Condition:
    """`threading.Condition`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is notified, or the time is over; tell which."""
        task = self._world.current_task()
        self._waiting.append(task)
        woken = self._world.block(timeout)
        if not woken and task in self._waiting:
            self._waiting.remove(task)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Block until the predicate holds, or the time is over; return what it says."""
        end_s = None if timeout is None else self._world.now_s + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - self._world.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify_all(self) -> None:
        """Wake all who wait."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)


class Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._changed = Condition(world)
        self._is_set = False

    def is_set(self) -> bool:
        """Tell whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, for good."""
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        """Make it as new."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, or the time is over; tell which."""
        self._changed.wait_for(lambda: self._is_set, timeout)
        return self._is_set


class Thread:
    """`threading.Thread`: a task of the process that starts it."""

    def __init__(self, world: World, *, target: Callable[[], object], **_: object) -> None:
        self._world = world
        self._target = target
        self._ended = Event(world)

    def start(self) -> None:
        """Let it run."""
        self._world.spawn(self._run)

    def join(self, timeout: float | None = None) -> None:
        """Block until it has ended, or the time is over."""
        self._ended.wait(timeout)

    def _run(self) -> None:
        self._target()
        self._ended.set()


class Future:
    """`concurrent.futures.Future`."""

    def __init__(self, world: World) -> None:
        self.ended = Event(world)
        self.value: Any = None
        self.error: Exception | None = None

    def done(self) -> bool:
        """Tell whether it has ended."""
        return self.ended.is_set()

    def result(self) -> Any:
        """Block until it has ended; return or raise what it ended with."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Executor:
    """`ThreadPoolExecutor`: tasks of the process that made it."""

    def __init__(self, world: World, max_workers: int, **_: object) -> None:
        self._world = world
        self._process = world.process
        self._num_idle = max_workers
        self._work: deque[Callable[[], None]] = deque()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Let a function run when its turn comes."""
        future = Future(self._world)

        def run() -> None:
            try:
                future.value = function(*arguments)
            except Exception as error:
                future.error = error
            future.ended.set()

        self._work.append(run)
        if self._num_idle:
            self._num_idle -= 1
            self._world.spawn(self._serve, self._process)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Begin with nothing more."""
        del wait
        if cancel_futures:
            self._work.clear()

    def _serve(self) -> None:
        while self._work:
            self._work.popleft()()
        self._num_idle += 1


class Waited(NamedTuple):
    """What `concurrent.futures.wait` returns."""

    done: set[Future]
    not_done: set[Future]


def wait(futures: Sequence[Future], timeout: float | None = None) -> Waited:
    """`concurrent.futures.wait` for one future."""
    (future,) = futures
    future.ended.wait(timeout)
    return Waited({future}, set()) if future.done() else Waited(set(), {future})


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Let the simulated modules live in a world instead of in this thread."""

    def bound(kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind(world, *args, **kwargs)

    threads = SimpleNamespace(
        Condition=bound(Condition),
        Event=bound(Event),
        Thread=bound(Thread),
        Lock=bound(Condition),  # nobody blocks while he holds one
    )
    clock = SimpleNamespace(monotonic=world.clock_s, perf_counter=world.clock_s, sleep=world.sleep)
    chance = SimpleNamespace(token_hex=lambda size: f"{world.random.getrandbits(8 * size):x}")
    stand_ins = {
        "threading": threads,
        "time": clock,
        "secrets": chance,
        "random": world.random,
        "ThreadPoolExecutor": bound(Executor),
        "wait": wait,
        # What a killed task holds is never let go, so thousands of seeds must open nothing.
        "open_arena": lambda num_bytes: None,
    }
    with _replaced(stand_ins):
        yield


@contextmanager
def _replaced(stand_ins: dict[str, object]) -> Iterator[None]:
    """Put others in the place of these names, in every module of `MODULES` that has them."""
    places = [
        (module, name, getattr(module, name))
        for module in map(importlib.import_module, MODULES)
        for name in stand_ins
        if hasattr(module, name)
    ]
    for module, name, _ in places:
        setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        for module, name, real in places:
            setattr(module, name, real)
