"""Engines and a coordinator of made-up answers, for the router and its legs."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.requests import (
    Accounting,
    EngineRequest,
    Finished,
    Output,
    OutputBatch,
)
from kvferry.proto.ids import Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.messages import Command, Done, Locate, Located, RemoveInstance, Reply, Role
from kvferry.worker.model.sampling import SamplingParams

IN_TIME_S = 10.0


def request(name: str) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name), prompt_token_ids=(1, 2, 3), sampling=SamplingParams()
    )


def finished(name: str) -> Output:
    accounting = Accounting(
        prompt_tokens=3, local_hit_tokens=0, remote_hit_tokens=0, computed_tokens=3
    )
    end = Finished(
        reason="length", accounting=accounting, pulled_bytes=0, preemptions=0, ahead_tokens=0
    )
    return Output(request_id=RequestId(name), token_ids=(7,), finished=end)


class FakeEngine:
    """Answers `outputs` with what is put into `answers`, in order, and finishes requests at once.

    `asked` counts the calls of `outputs`; `refusal` is what `submit` raises.
    """

    def __init__(self) -> None:
        self.answers: asyncio.Queue[OutputBatch | Exception] = asyncio.Queue()
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.asked = 0
        self.finishes = True

    async def submit(self, request: EngineRequest, *, timeout_s: float) -> None:
        self.submitted.append(request.request_id)
        if self.refusal is not None:
            raise self.refusal
        if self.finishes:
            self.answer(finished(request.request_id))

    async def abort(self, request_id: RequestId, *, timeout_s: float) -> None:
        self.aborted.append(request_id)

    async def outputs(self, since_seq: int, *, wait_s: float, timeout_s: float) -> OutputBatch:
        self.asked += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self, *outputs: Output) -> None:
        self.answers.put_nowait(OutputBatch(outputs=outputs, next_seq=0))

    def fail(self, error: Exception) -> None:
        self.answers.put_nowait(error)

    async def is_asked(self, count: int) -> None:
        """Wait for so many calls: what was put in before has been taken in then."""
        async with asyncio.timeout(IN_TIME_S):
            while self.asked < count:
                await asyncio.sleep(0)


@dataclass
class FakeCoordinator:
    """Knows nobody's blocks, and `avoid`."""

    avoid: tuple[InstanceId, ...] = ()
    removed: list[RemoveInstance] = field(default_factory=list)

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        if isinstance(command, RemoveInstance):
            self.removed.append(command)
        if isinstance(command, Locate):
            return Located(epoch=Epoch(1), holders=(), avoid=self.avoid)
        return Done(changed=True)


def link(engine: FakeEngine, role: Role = "decode", incarnation: int = 1) -> EngineLink:
    return EngineLink(engine=engine, role=role, incarnation=Incarnation(incarnation))


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in an event loop; it must end in time."""

    async def in_time() -> None:
        async with asyncio.timeout(IN_TIME_S):
            await test()

    asyncio.run(in_time())
