"""A service inside this process: real coordinator, real ranks with a model, real gRPC, no Ray."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.transfer_host import Host, new_host

from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.pool_size import KvSize
from kvferry.cluster.serving.rank import Rank, RankSettings
from kvferry.cluster.serving.rank_actor import RankActor
from kvferry.cluster.serving.requests import EngineRequest, OutputBatch
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.errors import DeadlineError, InstanceDiedError, UnavailableError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, InstanceInfo, Reply, Role
from kvferry.proto.step_messages import Step

BLOCK_TOKENS = 8


class InProcessCoordinator:
    """`CoordinatorPort` straight into the `CoordinatorActor` there is now."""

    def __init__(self, actor: Callable[[], CoordinatorActor]) -> None:
        self._actor = actor
        self.num_steps = 0
        self.may_answer_steps = threading.Event()
        self.may_answer_steps.set()

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        if isinstance(command, Step):
            self.num_steps += 1
            assert self.may_answer_steps.wait(timeout_s)
        return self._actor().call(command)


class AsyncInProcessCoordinator:
    """`AsyncCoordinatorPort` over the same."""

    def __init__(self, actor: Callable[[], CoordinatorActor]) -> None:
        self._actor = actor

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        return await asyncio.to_thread(self._actor().call, command)


class InProcessEngine:
    """`EnginePort` into a `RankActor`; `die` plays the end of its process."""

    def __init__(self, actor: RankActor) -> None:
        self._actor = actor
        self._dead = False

    def die(self) -> None:
        self._dead = True
        self._actor.stop()

    def _require_alive(self) -> None:
        if self._dead:
            raise InstanceDiedError("the process is gone")

    async def submit(self, request: EngineRequest, *, timeout_s: float) -> None:
        self._require_alive()
        await asyncio.to_thread(self._actor.submit, request)

    async def abort(self, request_id: RequestId, *, timeout_s: float) -> None:
        self._require_alive()
        await asyncio.to_thread(self._actor.abort, request_id)

    async def outputs(self, since_seq: int, *, wait_s: float, timeout_s: float) -> OutputBatch:
        self._require_alive()
        batch = await asyncio.to_thread(self._actor.outputs, since_seq, min(wait_s, 0.2))
        self._require_alive()
        return batch


def node_host() -> str:
    return "127.0.0.1"


class InProcessCall:
    """`PendingCall` over a thread of this process."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def done(self, timeout_s: float) -> bool:
        return bool(wait([self._future], timeout_s).done)

    def result(self, timeout_s: float) -> Any:
        if not self.done(timeout_s):
            raise DeadlineError("the rank did not answer")
        return self._future.result()


class InProcessRank:
    """`RankPort` into a `Rank`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._threads = ThreadPoolExecutor(8)

    def begin(self, method: str, *arguments: Any) -> InProcessCall:
        return InProcessCall(self._threads.submit(getattr(self.rank, method), *arguments))


@dataclass
class Service:
    """Coordinator and ranks in this process."""

    model: Path
    start_coordinator: Callable[[], CoordinatorActor]
    coordinator: CoordinatorActor = field(init=False)
    infos: dict[str, InstanceInfo] = field(default_factory=dict)
    engines: dict[str, InProcessEngine] = field(default_factory=dict)
    actors: list[RankActor] = field(default_factory=list)
    other_ranks: dict[str, list[InProcessRank]] = field(default_factory=dict)
    ports: dict[str, InProcessCoordinator] = field(default_factory=dict)
    calls: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.coordinator = self.start_coordinator()

    def restart_coordinator(self) -> None:
        """Another one answers, which knows of nobody."""
        self.coordinator.stop()
        self.coordinator = self.start_coordinator()

    def settings(
        self, name: str, role: Role, *, num_blocks: int = 200, **changes: object
    ) -> RankSettings:
        values: dict[str, object] = {
            "instance_id": InstanceId(name),
            "role": role,
            "model": str(self.model),
            "dtype": "float32",
            "device": "cpu",
            "layout": Layout(block_tokens=BLOCK_TOKENS),
            "hash_block_tokens": BLOCK_TOKENS,
            "kv_size": KvSize(num_blocks=num_blocks),
            "max_model_len": None,
            "token_budget": 64,
            "max_running": 8,
            "policy": "fcfs",
            "algorithm": "sha256_cbor",
            "key_format": "0.32",
            "bind": "127.0.0.1",
            "insecure": False,
            "rank_timeout_s": 10.0,
        }
        return RankSettings(**(values | changes))  # type: ignore[arg-type]

    def add(self, name: str, role: Role, **changes: Any) -> InstanceInfo:
        actor = RankActor(self.settings(name, role, **changes), node_host, self.spawn)
        self.actors.append(actor)
        self.ports[name] = InProcessCoordinator(lambda: self.coordinator)
        info = actor.start(self.ports[name])
        self.infos[name] = info
        self.engines[name] = InProcessEngine(actor)
        return info

    def spawn(self, settings: RankSettings) -> InProcessRank:
        rank = InProcessRank(Rank(settings, node_host))
        self.other_ranks.setdefault(settings.instance_id, []).append(rank)
        return rank

    def stop_transfers(self, name: str) -> None:
        """Let an instance's transfer server go; everything else of it lives on."""
        (actor,) = [a for a in self.actors if a._settings.instance_id == name]
        server = actor._own.worker._server
        assert server is not None
        server.stop()

    def router(self, **settings: object) -> Router:
        first = next(iter(self.infos.values()))
        return Router(
            coordinator=AsyncInProcessCoordinator(lambda: self.coordinator),
            engines={
                InstanceId(name): EngineLink(
                    engine=engine,
                    role=self.infos[name].role,
                    incarnation=self.infos[name].incarnation,
                )
                for name, engine in self.engines.items()
            },
            identity_digest=first.identity.digest(),
            scheme=first.scheme,
            settings=RouterSettings(**settings),  # type: ignore[arg-type]
        )

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()
        self.coordinator.stop()


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """Another process, for workers of any tests; who kills one needs one of its own."""
    with new_host() as running:
        yield running


MakeService = Callable[..., Service]


@contextlib.contextmanager
def running_service(model: Path) -> Iterator[Service]:
    """A service with no instance yet; invariants are checked at every call."""
    registry = ProcessRegistry()

    def start() -> CoordinatorActor:
        actor = CoordinatorActor(
            scheme=make_scheme(seed="0", hash_block_tokens=BLOCK_TOKENS),
            registry=registry,
            check_invariants=True,
        )
        actor.start()
        return actor

    running = Service(model, start)
    yield running
    running.stop()
    with pytest.raises(UnavailableError):
        running.coordinator.call(None)  # type: ignore[arg-type]


@pytest.fixture
def service(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service for the tiny model with full attention only."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with running_service(tiny_model) as running:
        yield running


@pytest.fixture
def hybrid_service(tiny_hybrid_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service for the tiny model with sliding-window and full layers, in three groups."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with running_service(tiny_hybrid_model) as running:
        yield running
