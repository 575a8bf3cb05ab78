"""Real engines, workers and coordinator around a model that checks every byte it reads."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from tests.builders import make_info
from tests.integration.token_model import (
    BLOCK_TOKENS,
    IDENTITY,
    SCHEME,
    LateWriter,
    TokenModel,
    new_worker,
)
from tests.waiting import wait_until

from kvferry.cluster.serving.engine import Engine
from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.serving.requests import EngineRequest, Finished, OutputBatch
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.group_specs import specs_of
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.messages import (
    Command,
    Describe,
    Description,
    InstanceInfo,
    Registered,
    RegisterInstance,
    Reply,
    Role,
    expect,
)
from kvferry.proto.step_messages import AdmitAsk, Progress, Release, Step, StepReply
from kvferry.worker.model.sampling import SamplingParams
from kvferry.worker.paths import ALL_PATHS, Path


def request(name: str, tokens: Sequence[int], max_tokens: int = 1, **more: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(
        request_id=RequestId(name), prompt_token_ids=tuple(tokens), sampling=sampling, **more
    )


class TokenInstance:
    """A registered instance with its engine, not yet started; `EnginePort` as well."""

    def __init__(
        self, service: "TokenService", name: str, role: Role, *, late: bool, **sizes: Any
    ) -> None:
        limits = Limits(
            **{"num_blocks": 100, "max_model_len": 128, "token_budget": 64, **sizes},
            block_tokens=BLOCK_TOKENS,
            max_running=8,
            specs=specs_of(IDENTITY, BLOCK_TOKENS),
        )
        self.service = service
        self.instance_id = InstanceId(name)
        self.num_steps = 0
        self.worker = new_worker(limits.num_blocks, paths=service.paths)
        self.model = TokenModel(self.worker.memory)
        self.info = member_info(
            name, self.worker.serve(), limits.num_blocks, role, max_model_len=limits.max_model_len
        )
        self.engine = Engine(
            info=self.info,
            registered=service.enter(self.info),
            limits=limits,
            scheme=SCHEME,
            eos_token_ids=frozenset(),
            coordinator=self,
            mover=LateWriter(self.worker) if late else self.worker,
            forward=self.model.forward,
        )
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._finished: dict[str, Finished] = {}
        self._next_seq = 0

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        """`CoordinatorPort`."""
        self.num_steps += isinstance(command, Step)
        return self.service.coordinator.call(command)

    def listen(self, wait_s: float) -> None:
        """Take the news there are, or wait for some."""
        batch = self.engine.outputs(self._next_seq, wait_s)
        self._next_seq = batch.next_seq
        for output in batch.outputs:
            known = self._tokens.get(output.request_id, ())
            self._tokens[output.request_id] = known + output.token_ids
            if output.finished is not None:
                self._finished[output.request_id] = output.finished

    def finished(self, name: str) -> Finished | None:
        """How a request ended, if it has and that was heard."""
        return self._finished.get(name)

    def result(self, name: str, within_s: float = 20.0) -> tuple[tuple[int, ...], Finished]:
        """Wait for a request's end; return its tokens and how it ended."""
        end = time.monotonic() + within_s
        while name not in self._finished:
            assert time.monotonic() < end, f"{name} has not ended"
            self.listen(0.1)
        return self._tokens[name], self._finished[name]

    def ask_again(self, num_steps: int = 3) -> None:
        """Wait until the engine has asked the coordinator so many more times."""
        wanted = self.num_steps + num_steps
        wait_until(lambda: self.num_steps >= wanted)

    async def submit(self, request: EngineRequest, *, timeout_s: float) -> None:
        """`EnginePort`, as are the next two."""
        self.engine.submit(request)

    async def abort(self, request_id: RequestId, *, timeout_s: float) -> None:
        self.engine.abort(request_id)

    async def outputs(self, since_seq: int, *, wait_s: float, timeout_s: float) -> OutputBatch:
        return await asyncio.to_thread(self.engine.outputs, since_seq, min(wait_s, 0.2))

    def stop(self) -> None:
        self.worker.gate.set()
        self.engine.stop(5.0)
        self.worker.stop()


class Coordinator(Protocol):
    """One life of a coordinator, or all of them, as a test has it."""

    def start(self) -> Epoch: ...

    def call(self, command: Command) -> Reply: ...

    def stop(self) -> None: ...


def in_this_process(**settings: Any) -> Callable[[], Coordinator]:
    """Return what makes lives of a coordinator that remember what they have to."""
    return partial(
        CoordinatorActor,
        scheme=SCHEME,
        registry=ProcessRegistry(),
        check_invariants=True,
        tick_interval_s=0.05,
        **settings,
    )


class TokenService:
    """A coordinator and the instances of a test."""

    def __init__(
        self,
        *,
        paths: Sequence[Path] = ALL_PATHS,
        make_coordinator: Callable[[], Coordinator] | None = None,
        **settings: Any,
    ) -> None:
        self.paths = paths
        self._make_coordinator = make_coordinator or in_this_process(**settings)
        self.coordinator = self._make_coordinator()
        self.epoch = self.coordinator.start()
        self.instances: list[TokenInstance] = []
        self._calls = itertools.count(1)

    def kill_coordinator(self) -> None:
        """From now on it answers nobody."""
        self.coordinator.stop()

    def restart_coordinator(self) -> None:
        """Another one answers, which knows of nobody."""
        self.kill_coordinator()
        coordinator = self._make_coordinator()
        self.epoch = coordinator.start()
        self.coordinator = coordinator

    def call_id(self) -> str:
        return f"test-{next(self._calls)}"

    def add(
        self,
        name: str,
        role: Role = "decode",
        *,
        late: bool = False,
        start: bool = True,
        **sizes: int,
    ) -> TokenInstance:
        instance = TokenInstance(self, name, role, late=late, **sizes)
        self.instances.append(instance)
        if start:
            instance.engine.start()
        return instance

    def register(
        self,
        name: str,
        address: str,
        num_blocks: int,
        role: Role = "prefill",
        *,
        incarnation: int = 1,
    ) -> None:
        self.enter(member_info(name, address, num_blocks, role, incarnation=incarnation))

    def enter(self, info: InstanceInfo) -> Registered:
        command = RegisterInstance(call_id=self.call_id(), info=info)
        return expect(self.coordinator.call(command), Registered)

    def step(self, name: str, incarnation: int = 1, **parts: Any) -> StepReply:
        """Take a step for an instance without an engine."""
        reply = self.coordinator.call(
            Step(
                call_id=self.call_id(),
                epoch=self.epoch,
                instance_id=InstanceId(name),
                incarnation=Incarnation(incarnation),
                token_budget=1000,
                **parts,
            )
        )
        assert isinstance(reply, StepReply)
        return reply

    def holds(self, name: str, tokens: Sequence[int], incarnation: int = 1) -> None:
        """Let an instance without an engine have a prompt's full blocks, from block 1 on."""
        who, num_tokens = RequestId("seed"), len(tokens)
        hashes = hash_tokens(SCHEME, tokens)
        ask = AdmitAsk(
            request_id=who,
            num_tokens=num_tokens,
            target_tokens=num_tokens,
            hashes=hashes,
            allow_remote=False,
        )
        (scheduled,) = self.step(name, incarnation, waiting=(ask,)).scheduled
        assert scheduled.new_block_ids[0][: len(hashes)] == tuple(range(1, 1 + len(hashes)))
        done = Progress(request_id=who, num_tokens=num_tokens, num_computed_tokens=num_tokens)
        self.step(name, incarnation, progress=(done,), releases=(Release(request_id=who),))

    def router(self) -> Router:
        """Return a router over all instances that have an engine."""
        links = {
            one.instance_id: EngineLink(
                engine=one, role=one.info.role, incarnation=one.info.incarnation
            )
            for one in self.instances
        }
        return Router(
            coordinator=self,
            engines=links,
            identity_digest=IDENTITY.digest(),
            scheme=SCHEME,
            settings=RouterSettings(),
        )

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        """`AsyncCoordinatorPort`."""
        return await asyncio.to_thread(self.coordinator.call, command)

    def description(self) -> Description:
        described = self.coordinator.call(Describe())
        assert isinstance(described, Description)
        return described

    def counter(self, name: str) -> int:
        return self.description().counters[name]

    def num_free(self, name: str) -> int:
        (found,) = [i for i in self.description().instances if i.info.instance_id == name]
        return found.num_free_blocks

    def require_nothing_held(self) -> None:
        """Nobody has blocks, leases or a handoff any more, at once or as soon as it is told."""
        wait_until(lambda: not any(i.num_requests for i in self.description().instances))
        described = self.description()
        assert [i.num_used_blocks for i in described.instances] == [0] * len(described.instances)
        assert (described.num_leases, described.num_handoffs) == (0, 0)

    def stop(self) -> None:
        for instance in self.instances:
            instance.stop()
        self.coordinator.stop()


def member_info(
    name: str,
    address: str,
    num_blocks: int,
    role: Role,
    *,
    incarnation: int = 1,
    max_model_len: int = 128,
) -> InstanceInfo:
    return make_info(
        name,
        role=role,
        incarnation=Incarnation(incarnation),
        identity=IDENTITY,
        scheme=SCHEME,
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_blocks,
        rank_addresses=(address,),
        max_model_len=max_model_len,
    )


@contextmanager
def token_service(**settings: Any) -> Iterator[TokenService]:
    service = TokenService(**settings)
    try:
        yield service
    finally:
        service.stop()
