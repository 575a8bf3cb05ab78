"""The real router on virtual time: an event loop that waits in the world instead of the kernel."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvferry.cluster.serving.requests import EngineRequest, OutputBatch
from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.world import Process, World
from kvferry.proto.errors import InstanceDiedError, KvferryError, UnavailableError
from kvferry.proto.ids import RequestId
from kvferry.proto.messages import Command, Reply

_T = TypeVar("_T")


class _NoFiles(selectors.SelectSelector):
    """Waits for wake-ups alone."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.woken = Event(world)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self.woken.wait(timeout)
        self.woken.clear()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs in one task of a world; others of its process reach it by `call_soon_threadsafe`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._selector_here = _NoFiles(world)
        super().__init__(self._selector_here)

    def time(self) -> float:
        """Return the virtual time."""
        return self._world.now_s

    def _write_to_self(self) -> None:
        self._selector_here.woken.set()


class AsyncCalls:
    """Calls of other processes, awaited in a loop.

    Args:
        network: carries them.
        loop: of whoever awaits.
        process: where that loop runs.
    """

    def __init__(self, network: Network, loop: asyncio.AbstractEventLoop, process: Process) -> None:
        self._network = network
        self._loop = loop
        self._process = process

    async def call(self, to: Process, work: Callable[[], _T], *, timeout_s: float) -> _T:
        """As `Network.call`."""
        answer: asyncio.Future[_T] = self._loop.create_future()

        def settle(value: Any, error: KvferryError | None) -> None:
            if answer.done():  # nobody waits any more
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        def run() -> None:
            value, failed = None, None
            try:
                value = self._network.call(to, work, timeout_s=timeout_s, reliable=True)
            except KvferryError as error:
                failed = error
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(settle, value, failed)

        self._network.world.spawn(run, self._process)
        return await answer


class AsyncCoordinator:
    """`AsyncCoordinatorPort`."""

    def __init__(self, calls: AsyncCalls, coordinators: Coordinators) -> None:
        self._calls = calls
        self._coordinators = coordinators

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        """Return the reply."""
        coordinators = self._coordinators
        return await self._calls.call(
            coordinators.process, lambda: coordinators.handle(command), timeout_s=timeout_s
        )


class AsyncEngine:
    """`EnginePort`; like Ray, it tells a process that has ended from one that does not answer."""

    def __init__(self, calls: AsyncCalls, instance: Instance) -> None:
        self._calls = calls
        self._instance = instance

    async def submit(self, request: EngineRequest, *, timeout_s: float) -> None:
        """Queue a request."""
        await self._call(lambda: self._engine.submit(request), timeout_s)

    async def abort(self, request_id: RequestId, *, timeout_s: float) -> None:
        """End a request early."""
        await self._call(lambda: self._engine.abort(request_id), timeout_s)

    async def outputs(self, since_seq: int, *, wait_s: float, timeout_s: float) -> OutputBatch:
        """Return news."""
        return await self._call(lambda: self._engine.outputs(since_seq, wait_s), timeout_s)

    @property
    def _engine(self) -> Any:
        return self._instance.engine

    async def _call(self, work: Callable[[], _T], timeout_s: float) -> _T:
        process = self._instance.process
        try:
            return await self._calls.call(process, work, timeout_s=timeout_s)
        except UnavailableError as error:
            if process.is_alive:
                raise
            raise InstanceDiedError(f"{process.name} died", given=process.name) from error


def run_in_loop(loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run a loop until its main coroutine ends."""
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()
