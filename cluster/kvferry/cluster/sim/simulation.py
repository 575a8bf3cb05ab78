"""One simulated service: coordinator, instances, router, workload and faults, from one seed."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvferry.cluster.serving.legs import EngineLink
from kvferry.cluster.serving.router import Router, RouterSettings
from kvferry.cluster.sim.blocking import simulated
from kvferry.cluster.sim.checks import check_residency, check_rest
from kvferry.cluster.sim.content import KnownContent
from kvferry.cluster.sim.faults import Faults, Profile
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.instances import Instance, InstancePlan, identity_of
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.routing import (
    AsyncCalls,
    AsyncCoordinator,
    AsyncEngine,
    VirtualLoop,
    run_in_loop,
)
from kvferry.cluster.sim.workload import Outcomes, Workload
from kvferry.cluster.sim.world import Process, Task, World
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError, StaleError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import Epoch, Incarnation, InstanceId
from kvferry.proto.messages import Command, Reply, Role, Tick

HASH_BLOCK_TOKENS = 4
MAX_MODEL_LEN = 64
TICK_S = 0.5
LEASE_CAP_S = 30.0
STEP_LEASE_S = 15.0
REQUEST_TIMEOUT_S = 60.0
HANDOFF_TTL_S = 10.0
RESTART_S = 0.5
QUIET_S = 400.0
"""So long everything may take to come to its end once nothing goes wrong any more."""

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
    num_crashes: int
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
        self.num_crashes = 0
        random = self.world.random
        self._profile = profile
        self._scheme = make_scheme(hash_block_tokens=HASH_BLOCK_TOKENS)
        self._known = KnownContent(self._scheme)
        self._coordinator = Process("coordinator")
        self._service = CoordinatorService(
            scheme=self._scheme,
            epoch=Epoch(1),
            lease_cap_s=LEASE_CAP_S,
            step_lease_s=STEP_LEASE_S,
            check_invariants=True,
        )
        self._router_process = Process("router")
        self._operator = Process("operator")
        self._served: dict[str, Served] = {}
        self._lives: dict[InstanceId, Instance] = {}
        self._plans = {plan.instance_id: plan for plan in self._draw_plans()}
        self._incarnations = dict.fromkeys(self._plans, 0)
        self._workload = Workload(
            random,
            self._known,
            max_model_len=MAX_MODEL_LEN,
            block_tokens=2 * HASH_BLOCK_TOKENS,
            pause_s=PAUSE_S,
        )
        self._loop: VirtualLoop | None = None
        self._router: Router | None = None
        self._faults = Faults(
            self.network,
            profile,
            processes=self._processes,
            crash=self._crash,
            take_for_dead=self._take_for_dead,
            crashable=lambda: list(self._lives),
        )
        self._is_done = False

    @property
    def outcomes(self) -> Outcomes:
        """How requests ended so far."""
        return self._workload.outcomes

    def run(self, num_steps: int) -> None:
        """Let things go wrong for so many steps; then all must come to a good end.

        Raises:
            Exception: what was violated.
        """
        world = self.world
        world.spawn(self._tick, self._coordinator)
        for instance_id in self._plans:
            world.spawn(lambda name=instance_id: self._start(name), self._operator)  # type: ignore[misc]
        world.spawn(self._route, self._router_process)
        world.spawn(self._faults.start, self._operator)
        world.after_step = self._check
        world.run(num_steps)
        self._faults.stop()
        self._workload.is_over = True
        end_s = world.now_s + QUIET_S
        world.run(until=lambda: self._is_done or world.now_s > end_s)
        if not self._is_done:
            raise InvariantError(
                "something did not come to its end though nothing went wrong any more",
                given=sorted(self.outcomes.in_flight),
                allowed=f"{QUIET_S:g} s",
            )
        rest_s = world.now_s + LEASE_CAP_S + 1.0
        world.run(until=lambda: world.now_s > rest_s)
        check_rest(self._service, self._lives)

    # --- processes ---------------------------------------------------------------------------

    def _handle(self, command: Command) -> Reply:
        reply, _ = self._service.handle(command, self.world.clock_s())
        return reply

    def _tick(self) -> None:
        while True:
            self.world.sleep(TICK_S)
            self._handle(Tick())

    def _start(self, instance_id: InstanceId) -> None:
        """Start the next life of an instance, in the operator's process."""
        self._incarnations[instance_id] += 1
        incarnation = Incarnation(self._incarnations[instance_id])
        random, skew = self.world.random, self._profile.clock_skew
        process = Process(
            f"{instance_id}:{incarnation}",
            clock_offset_s=1000.0 * random.random(),
            clock_rate=1.0 + skew * (2 * random.random() - 1),
        )
        fetcher = FetchClient(
            self.network,
            self._served,
            frame_bytes=random.choice([16, 64, 100, 4096]),
            shared=0.5,
        )
        instance = Instance(
            self.network,
            self._plans[instance_id],
            incarnation,
            process,
            fetcher=fetcher,
            coordinator=self._handle,
            coordinator_process=self._coordinator,
        )
        self._lives[instance_id] = instance
        self._served[instance.address] = instance.served
        self.world.spawn(lambda: self._join(instance), process)

    def _join(self, instance: Instance) -> None:
        try:
            instance.join()
            self.world.spawn(lambda: self._tell_router(instance), self._router_process)
            instance.watch()
        except StaleError:
            pass  # a later life was faster
        self.world.spawn(lambda: self._end(instance), self._operator)

    def _end(self, instance: Instance) -> None:
        """End a life, as it stands; the next one begins unless it has already."""
        self.world.kill(instance.process)
        if self._lives.get(instance.plan.instance_id) is instance:
            del self._lives[instance.plan.instance_id]
            self.world.spawn(
                lambda: self._start(instance.plan.instance_id), self._operator, after_s=RESTART_S
            )

    def _tell_router(self, instance: Instance) -> None:
        while self._router is None or self._loop is None:
            self.world.sleep(0.01)
        is_current = self._lives.get(instance.plan.instance_id) is instance
        if not is_current or self._loop.is_closed():
            return
        calls = AsyncCalls(self.network, self._loop, self._router_process)
        link = EngineLink(
            engine=AsyncEngine(calls, instance),
            role=instance.plan.role,
            incarnation=instance.incarnation,
        )
        self._loop.call_soon_threadsafe(self._router.join, instance.plan.instance_id, link)

    def _crash(self, instance_id: InstanceId) -> None:
        self.num_crashes += 1
        self._end(self._lives[instance_id])

    def _take_for_dead(self, instance_id: InstanceId) -> None:
        """Begin the next life of an instance while the last one goes on."""
        del self._lives[instance_id]
        self._start(instance_id)

    def _processes(self) -> list[Process]:
        return [self._coordinator, *(instance.process for instance in self._lives.values())]

    def _route(self) -> None:
        self._loop = VirtualLoop(self.world)
        run_in_loop(self._loop, self._serve(self._loop))
        self._is_done = True

    async def _serve(self, loop: VirtualLoop) -> None:
        calls = AsyncCalls(self.network, loop, self._router_process)
        self._router = Router(
            coordinator=AsyncCoordinator(calls, self._coordinator, self._handle),
            engines={},
            identity_digest=next(iter(self._plans.values())).identity.digest(),
            scheme=self._scheme,
            settings=RouterSettings(
                request_timeout_s=REQUEST_TIMEOUT_S,
                handoff_ttl_s=HANDOFF_TTL_S,
                min_prefill_hashes=1,
                overlap=self.world.random.random() < 0.7,
            ),
        )
        await self._router.start()
        await asyncio.sleep(1.0)
        await self._workload.run(self._router)
        await self._router.close()

    # --- what there is -----------------------------------------------------------------------

    def _draw_plans(self) -> Iterator[InstancePlan]:
        random = self.world.random
        counts: dict[Role, int] = {"prefill": random.randrange(3), "decode": random.randrange(2, 4)}
        roles = [role for role, count in counts.items() for _ in range(count)]
        for index, role in enumerate(roles):
            block_tokens = HASH_BLOCK_TOKENS * random.choice([1, 1, 2])
            least = MAX_MODEL_LEN // block_tokens + 1
            yield InstancePlan(
                instance_id=InstanceId(f"{role}-{index}"),
                role=role,
                identity=identity_of("1"),
                scheme=self._scheme,
                block_tokens=block_tokens,
                num_blocks=least + random.randrange(0, least),
                max_model_len=MAX_MODEL_LEN,
                token_budget=random.choice([8, 16, 64]),
                max_running=random.choice([2, 4, 8]),
            )

    def _check(self, task: Task) -> None:
        lives = [one for one in self._lives.values() if one.process is task.process]
        for instance in lives:
            check_residency(self._service, instance, self._known, self.world.random)


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
    simulation = Simulation(seed, replace(profile))
    violation: str | None = None
    with _quiet(), simulated(simulation.world):
        try:
            simulation.run(num_steps)
        except Exception as error:  # whatever a service let through is what is looked for
            violation = f"{type(error).__name__}: {error}"
    # A run that was cut short leaves its loop running, as far as asyncio knows.
    asyncio._set_running_loop(None)  # noqa: SLF001
    return Result(
        seed=seed,
        profile=profile_name,
        num_steps=simulation.world.num_steps,
        virtual_s=simulation.world.now_s,
        num_right=simulation.outcomes.num_right,
        num_given_up=simulation.outcomes.num_given_up,
        failures=simulation.outcomes.failures,
        remote_hit_tokens=simulation.outcomes.remote_hit_tokens,
        num_crashes=simulation.num_crashes,
        violation=violation,
    )
