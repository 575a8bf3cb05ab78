"""One simulated service: coordinator, members, router, workload and faults, from one seed."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.cluster.sim.blocking import simulated
from kvferry.cluster.sim.checks import check_residency, check_rest
from kvferry.cluster.sim.content import KnownContent
from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.faults import Faults, Profile
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.members import MemberPlan, identity_of
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.population import (
    FIRST_WEIGHTS,
    LARGEST_BLOCK_HASHES,
    MAX_MODEL_LEN,
    Population,
)
from kvferry.cluster.sim.routing import (
    AsyncCalls,
    AsyncCoordinator,
    AsyncEngine,
    VirtualLoop,
    run_in_loop,
)
from kvferry.cluster.sim.workload import Workload
from kvferry.cluster.sim.world import Process, Task, World
from kvferry.proto.errors import InvariantError
from kvferry.proto.hashing import make_scheme

HASH_BLOCK_TOKENS = 4
LEASE_CAP_S = 30.0
STEP_LEASE_S = 15.0
REQUEST_TIMEOUT_S = 60.0
HANDOFF_TTL_S = 10.0
WARM_SHARES = (0.0, 0.5)
QUIET_S = 400.0
"""So long everything may take to come to its end once nothing goes wrong any more."""

LOOK_S = 1.0
"""So often is asked then whether anything is still held."""

PAUSE_S = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to; `violation` is None where all was well."""

    seed: int
    profile: str
    num_steps: int
    virtual_s: float
    num_right: int
    num_given_up: int
    failures: list[str]
    remote_hit_tokens: int
    num_saves: int
    num_resets: int
    num_loaded_blocks: int
    num_crashes: int
    num_restarts: int
    num_renewals: int
    num_sharded_lives: int
    num_suspects: int
    num_deaths: int
    num_drains: int
    num_drained_blocks: int
    num_warmed_blocks: int
    violation: str | None


class Simulation:
    """Build, then `run`.

    Args:
        seed: decides everything.
        profile: what goes wrong.
    """

    def __init__(self, seed: int, profile: Profile) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self._scheme = make_scheme(hash_block_tokens=HASH_BLOCK_TOKENS)
        self._known = KnownContent(self._scheme)
        self._router_process = Process("router")
        self._operator = Process("operator")
        self.coordinators = Coordinators(
            self.world,
            self._scheme,
            operator=self._operator,
            clock_skew=profile.clock_skew,
            lease_cap_s=LEASE_CAP_S,
            step_lease_s=STEP_LEASE_S,
            warm_share=self.world.random.choice(WARM_SHARES),
        )
        self.population = Population(
            self.network,
            self._scheme,
            coordinators=self.coordinators,
            operator=self._operator,
            clock_skew=profile.clock_skew,
            told=self._tell_router,
        )
        self.workload = Workload(
            self.world.random,
            self._known,
            max_model_len=MAX_MODEL_LEN,
            block_tokens=LARGEST_BLOCK_HASHES * HASH_BLOCK_TOKENS,
            pause_s=PAUSE_S,
            violated=self.world.fail,
        )
        self._loop: VirtualLoop | None = None
        # By the weights of their model; new requests go to the last one that can decode.
        self._routers: dict[str, Router] = {}
        self._weights = str(FIRST_WEIGHTS)
        self._overlap = self.world.random.random() < 0.7
        self._faults = Faults(
            self.network,
            profile,
            processes=self._processes,
            coordinator=self.coordinators,
            victims=self.population.victims,
            renew=self.population.renew,
            drain=self.population.drain,
        )
        self._is_done = False

    def run(self, num_steps: int) -> None:
        """Let things go wrong for so many steps; then all must come to a good end.

        Raises:
            Exception: what was violated.
        """
        world = self.world
        world.spawn(self.coordinators.begin, self._operator)
        world.spawn(self.population.start, self._operator)
        world.spawn(self._route, self._router_process)
        world.spawn(self._faults.start, self._operator)
        world.after_step = self._check
        world.run(num_steps)
        self._faults.stop()
        self.workload.is_over = True
        for client in self.population.clients:
            client.is_over = True
        end_s = world.now_s + QUIET_S
        world.run(until=lambda: self._is_done or world.now_s > end_s)
        if not self._is_done:
            raise InvariantError(
                "something did not come to its end though nothing went wrong any more",
                given=sorted(self.workload.outcomes.in_flight),
                allowed=f"{QUIET_S:g} s",
            )
        self._come_to_rest(world.now_s + LEASE_CAP_S + 1.0)

    def _come_to_rest(self, end_s: float) -> None:
        """Wait until nothing is held.

        Raises:
            InvariantError: what is, at the end.
        """
        world = self.world
        while True:
            world.run(until=partial(world.is_later_than, world.now_s + LOOK_S))
            try:
                check_rest(self.coordinators.service(), self.population.lives)
            except InvariantError:
                if world.now_s > end_s:
                    raise
            else:
                return

    # --- processes ---------------------------------------------------------------------------

    def _processes(self) -> list[Process]:
        lives = [*self.population.lives.values(), *self.population.clients]
        parts = [part.process for life in lives for part in life.parts]
        return [self.coordinators.process, *parts]

    def _tell_router(self, instance: Instance) -> None:
        while self._loop is None or not self._routers:
            self.world.sleep(0.01)
        if not self.population.is_current(instance) or self._loop.is_closed():
            return
        calls = AsyncCalls(self.network, self._loop, self._router_process)
        link = EngineLink(
            engine=AsyncEngine(calls, instance),
            role=instance.plan.role,
            incarnation=instance.incarnation,
        )
        self._loop.call_soon_threadsafe(self._join, calls, instance.plan, link)

    def _join(self, calls: AsyncCalls, plan: MemberPlan, link: EngineLink) -> None:
        weights = plan.identity.weight_version
        if weights not in self._routers:
            self._routers[weights] = self._new_router(calls, weights)
        self._routers[weights].join(plan.instance_id, link)
        if plan.role == "decode":
            self._weights = max(self._weights, weights, key=int)

    def _route(self) -> None:
        self._loop = VirtualLoop(self.world)
        run_in_loop(self._loop, self._serve(self._loop))
        self._is_done = True

    async def _serve(self, loop: VirtualLoop) -> None:
        calls = AsyncCalls(self.network, loop, self._router_process)
        self._routers[self._weights] = first = self._new_router(calls, self._weights)
        await first.start()
        await asyncio.sleep(1.0)
        await self.workload.run(lambda: (self._routers[self._weights], self._weights))
        for router in self._routers.values():
            await router.close()

    def _new_router(self, calls: AsyncCalls, weights: str) -> Router:
        return Router(
            coordinator=AsyncCoordinator(calls, self.coordinators),
            engines={},
            identity_digest=identity_of("inside", int(weights)).digest(),
            scheme=self._scheme,
            settings=RouterSettings(
                request_timeout_s=REQUEST_TIMEOUT_S,
                handoff_ttl_s=HANDOFF_TTL_S,
                min_prefill_hashes=1,
                overlap=self._overlap,
            ),
        )

    def _check(self, task: Task) -> None:
        service = self.coordinators.service()
        if service is None:
            return
        for life in self.population.lives.values():
            if any(part.process is task.process for part in life.parts):
                check_residency(service, life, self._known, self.world.random)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing: it would be what goes wrong on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def simulate(seed: int, num_steps: int, profile_name: str, profile: Profile) -> Result:
    """Run a simulation and tell how it went."""
    simulation = Simulation(seed, profile)
    violation: str | None = None
    with _quiet(), simulated(simulation.world):
        try:
            simulation.run(num_steps)
        except Exception as error:  # whatever a service let through is what is looked for
            violation = f"{type(error).__name__}: {error}"
    # A run that was cut short leaves its loop running, as far as asyncio knows.
    asyncio._set_running_loop(None)  # noqa: SLF001
    outcomes, population = simulation.workload.outcomes, simulation.population
    return Result(
        seed=seed,
        profile=profile_name,
        num_steps=simulation.world.num_steps,
        virtual_s=simulation.world.now_s,
        num_right=outcomes.num_right,
        num_given_up=outcomes.num_given_up,
        failures=outcomes.failures,
        remote_hit_tokens=outcomes.remote_hit_tokens,
        num_saves=sum(len(saves.ended_s) for saves in population.saves),
        num_resets=sum(saves.num_resets for saves in population.saves),
        num_loaded_blocks=sum(saves.num_loaded_blocks for saves in population.saves),
        num_crashes=population.num_crashes,
        num_restarts=simulation.coordinators.num_restarts,
        num_renewals=population.num_renewals,
        num_sharded_lives=population.num_sharded_lives,
        num_suspects=simulation.coordinators.count("suspects"),
        num_deaths=simulation.coordinators.count("deaths"),
        num_drains=simulation.coordinators.count("drains"),
        num_drained_blocks=simulation.coordinators.count("drained_blocks"),
        num_warmed_blocks=simulation.coordinators.count("warmed_blocks"),
        violation=violation,
    )
