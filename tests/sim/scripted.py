"""A simulated service in which things go wrong at moments that a test names.

The services, the network and the model of contents are those of `kvferry sim`; nothing is left to
chance but delays of up to a millisecond.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.sim.scripted_life import NEWS_S, Life, ScriptedFetch

from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.requests import EngineRequest, Finished
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.cluster.sim.blocking import Event, simulated
from kvferry.cluster.sim.checks import check_residency, check_rest
from kvferry.cluster.sim.content import KnownContent, answer_of
from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.fetching import Served
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.members import Birth, Member, MemberPlan, identity_of
from kvferry.cluster.sim.network import Network, Weather
from kvferry.cluster.sim.routing import (
    AsyncCalls,
    AsyncCoordinator,
    AsyncEngine,
    VirtualLoop,
    run_in_loop,
)
from kvferry.cluster.sim.stores import Store
from kvferry.cluster.sim.workload import tokens_of
from kvferry.cluster.sim.world import Process, Task, World
from kvferry.coordinator.instances import Instance as KnownInstance
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import BlockHash, Incarnation, InstanceId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, Reply, Role
from kvferry.worker.model.sampling import SamplingParams

SCHEME = make_scheme(hash_block_tokens=4)
WEIGHTS = "1"
NO_KEYS = RequestKeys()
ONE_RANK = Layout(block_tokens=4)
SOON_S = 1.0
"""What nothing holds up takes less."""

_T = TypeVar("_T")


class Scenario:
    """Members are made by `add` and `add_store`; time passes in `until` and `run_for` only.

    Args:
        world: a new one, in which the simulated modules live.
        step_lease_s: as `CoordinatorService`.
    """

    def __init__(self, world: World, *, step_lease_s: float) -> None:
        self.world = world
        self.network = Network(world, Weather(longest_delay_s=0.001))
        self.served: dict[str, Served] = {}
        self.known = KnownContent(SCHEME)
        self.lives: dict[InstanceId, Life] = {}
        self._operator = Process("operator")
        self.coordinators = Coordinators(
            world,
            SCHEME,
            operator=self._operator,
            clock_skew=0.0,
            lease_cap_s=30.0,
            step_lease_s=step_lease_s,
        )
        world.after_step = self._check
        world.spawn(self.coordinators.begin, self._operator)
        self.until(lambda: self.coordinators.service() is not None)

    # --- members ---------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        role: Role = "decode",
        *,
        num_blocks: int = 40,
        layout: Layout = ONE_RANK,
        max_model_len: int = 128,
        token_budget: int = 64,
        incarnation: int = 1,
    ) -> Life:
        """Begin a life of an instance, and wait until it serves."""
        plan = _plan(name, role, layout, num_blocks, max_model_len)
        fetch = ScriptedFetch(self.network, self.served)
        birth = self._birth(plan, incarnation, fetch)
        life = Life(Instance(birth, token_budget=token_budget, max_running=8), fetch)
        self._begin(life)
        self.until(lambda: life.engine is not None)
        self.world.spawn(life.listen, life.member.process)
        return life

    def add_store(self, name: str, *, num_blocks: int = 40, incarnation: int = 1) -> Life:
        """Begin a life of a store, and wait until it is a member."""
        plan = _plan(name, "store", ONE_RANK, num_blocks, 0)
        fetch = ScriptedFetch(self.network, self.served)
        life = Life(Store(self._birth(plan, incarnation, fetch)), fetch)
        self._begin(life)
        self.until(lambda: self.is_member(life))
        return life

    def kill(self, life: Life, rank: int = 0) -> None:
        """End a process of a life where it stands."""
        self.world.kill(life.member.parts[rank].process)
        if rank == 0:
            self.lives.pop(life.member.plan.instance_id)

    def pause(self, life: Life, seconds: float, rank: int = 0) -> None:
        """Freeze a process of a life."""
        self.world.pause(life.member.parts[rank].process, seconds)

    # --- requests --------------------------------------------------------------------------------

    def request(
        self, name: str, tokens: Sequence[int], max_tokens: int = 1, **more: Any
    ) -> EngineRequest:
        """Return a request whose answer's blocks are known."""
        self.known.learn([*tokens, *answer(tokens, max_tokens)], NO_KEYS, WEIGHTS)
        return EngineRequest(
            request_id=RequestId(name),
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            **more,
        )

    def submit(
        self, life: Life, name: str, tokens: Sequence[int], max_tokens: int = 1, **more: Any
    ) -> None:
        """Queue a request at an engine."""
        life.engine.submit(self.request(name, tokens, max_tokens, **more))

    def result(
        self, life: Life, name: str, within_s: float = SOON_S
    ) -> tuple[tuple[int, ...], Finished]:
        """Wait for a request's end; return its tokens and how it ended."""
        self.until(lambda: name in life.finished, within_s)
        return life.tokens.get(name, ()), life.finished[name]

    def compute(self, life: Life, name: str, tokens: Sequence[int]) -> None:
        """Let an instance have all full blocks of a prompt."""
        self.submit(life, name, tokens, prefill_only=True)
        assert self.result(life, name)[1].reason == "prefilled"
        self.told(life)

    def told(self, life: Life) -> None:
        """Wait until the coordinator knows of no request of an instance any more."""
        self.until(lambda: self.known_of(life).num_requests == 0)

    def routed(
        self, work: Callable[[Router], Coroutine[Any, Any, _T]], within_s: float = 30.0
    ) -> _T:
        """Let a router serve all instances while `work` runs; return or raise what came of it.

        From then on it alone hears of requests.
        """
        for life in self.lives.values():
            life.listens = False
        self.run_for(2 * NEWS_S)
        loop, process = VirtualLoop(self.world), Process("router")
        calls = AsyncCalls(self.network, loop, process)
        results: list[_T] = []
        failures: list[KvferryError] = []

        async def run() -> None:
            router = self._router(calls)
            await router.start()
            try:
                results.append(await work(router))
            except KvferryError as error:
                failures.append(error)
            await router.close()

        ended = Event(self.world)

        def serve() -> None:
            run_in_loop(loop, run())
            ended.set()

        self.world.spawn(serve, process)
        self.until(ended.is_set, within_s)
        if failures:
            raise failures[0]
        return results[0]

    def ask(self, command: Command) -> Reply:
        """Let a process of its own call the coordinator; return or raise what came back."""
        replies: list[Reply | KvferryError] = []
        coordinators = self.coordinators

        def call() -> None:
            try:
                reply = self.network.call(
                    coordinators.process, lambda: coordinators.handle(command), timeout_s=5.0
                )
            except KvferryError as error:
                replies.append(error)
            else:
                replies.append(reply)

        self.world.spawn(call, Process("client"))
        self.until(lambda: len(replies) > 0, 5.0)
        (reply,) = replies
        if isinstance(reply, KvferryError):
            raise reply
        return reply

    # --- time ------------------------------------------------------------------------------------

    def until(self, holds: Callable[[], bool], within_s: float = SOON_S) -> None:
        """Let time pass until something holds, as it must within so many seconds."""
        end_s = self.world.now_s + within_s
        self.world.run(until=lambda: holds() or self.world.now_s > end_s)
        assert holds(), f"not within {within_s:g} s"

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.world.now_s + seconds
        self.world.spawn(lambda: None, self._operator, after_s=seconds)
        self.world.run(until=lambda: self.world.now_s >= end_s)

    # --- looking in ------------------------------------------------------------------------------

    @property
    def service(self) -> CoordinatorService:
        """That of the coordinator's present life."""
        service = self.coordinators.service()
        assert service is not None
        return service

    def known_of(self, life: Life) -> KnownInstance:
        """What the coordinator knows of a member."""
        return self.service.state.instances[life.member.plan.instance_id]

    def is_member(self, life: Life) -> bool:
        """Tell whether the coordinator's present life knows a life of a member."""
        service, plan = self.coordinators.service(), life.member.plan
        known = service and service.state.instances.get(plan.instance_id)
        return bool(known and known.info.incarnation == life.member.incarnation)

    def num_free(self, life: Life) -> int:
        """The free blocks of a member."""
        return self.known_of(life).manager.pool.num_free_blocks

    def counter(self, name: str) -> int:
        """One of the coordinator's."""
        return self.service.state.counters[name]

    def require_nothing_held(self, within_s: float = SOON_S) -> None:
        """Nobody holds a block, or anything that could."""

        def is_at_rest() -> bool:
            try:
                check_rest(self.coordinators.service(), self.members())
            except InvariantError:
                return False
            return True

        self.until(is_at_rest, within_s)

    def members(self) -> dict[InstanceId, Member]:
        """All present lives."""
        return {name: life.member for name, life in self.lives.items()}

    # --- inside ----------------------------------------------------------------------------------

    def _birth(self, plan: MemberPlan, incarnation: int, fetch: ScriptedFetch) -> Birth:
        return Birth(
            network=self.network,
            plan=plan,
            incarnation=Incarnation(incarnation),
            # A later life has the addresses of the earlier one.
            process_of_rank=lambda rank: Process(f"{plan.instance_id}/{rank}"),
            fetcher=fetch,
            coordinators=self.coordinators,
        )

    def _begin(self, life: Life) -> None:
        member = life.member
        self.served.update((part.address, part.served) for part in member.parts)
        self.lives[member.plan.instance_id] = life
        self.world.spawn(member.join, member.process)

    def _router(self, calls: AsyncCalls) -> Router:
        links = {
            name: EngineLink(
                engine=AsyncEngine(calls, life.instance),
                role=life.member.plan.role,
                incarnation=life.member.incarnation,
            )
            for name, life in self.lives.items()
            if life.member.plan.role != "store"
        }
        return Router(
            coordinator=AsyncCoordinator(calls, self.coordinators),
            engines=links,
            identity_digest=identity_of("inside", int(WEIGHTS)).digest(),
            scheme=SCHEME,
            settings=RouterSettings(request_timeout_s=60.0, handoff_ttl_s=10.0),
        )

    def _check(self, _: Task) -> None:
        service = self.coordinators.service()
        if service is not None:
            for life in self.lives.values():
                check_residency(service, life.member, self.known, self.world.random)


@contextmanager
def scenario(*, step_lease_s: float = 5.0) -> Iterator[Scenario]:
    """Yield a service without members."""
    world = World(1)
    with simulated(world):
        yield Scenario(world, step_lease_s=step_lease_s)
    # What still runs in the world leaves its loop behind, as far as asyncio knows.
    asyncio._set_running_loop(None)


def prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that shares no block with those of other seeds."""
    return tokens_of(World(seed).random, num_tokens)


def answer(tokens: Sequence[int], num_tokens: int = 1) -> tuple[int, ...]:
    """Return what the model says after a prompt."""
    return answer_of(tokens, NO_KEYS, WEIGHTS, num_tokens)


def at_frame(number: int, do: Callable[[], None]) -> Callable[[int], None]:
    """Return what does something at the frame of a number."""
    return lambda count: do() if count == number else None


def hashes_of(tokens: Sequence[int]) -> tuple[BlockHash, ...]:
    """Return the hashes of a prompt's full blocks."""
    return hash_tokens(SCHEME, tokens, NO_KEYS)


def _plan(name: str, role: Role, layout: Layout, num_blocks: int, max_model_len: int) -> MemberPlan:
    return MemberPlan(
        instance_id=InstanceId(name),
        role=role,
        identity=identity_of("inside", int(WEIGHTS)),
        scheme=SCHEME,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
    )
