"""Who lives in a simulated service: which members there are, and the lives they begin and end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvferry.cluster.sim.clients import Client, Saves, prompts_for_clients
from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.members import Birth, Member, MemberPlan, identity_of
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.stores import Store
from kvferry.cluster.sim.world import Process
from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import DrainedError, KvferryError, StaleError
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.layout import Layout, grid
from kvferry.proto.messages import Role, expect
from kvferry.proto.scheme import HashScheme

FIRST_WEIGHTS = 1
MAX_MODEL_LEN = 64
RESTART_S = 0.5
CLIENT_PAUSE_S = 0.15
LARGEST_BLOCK_HASHES = 2
ONE_RANK = 0.6
OTHER_LAYOUT = 0.5
"""How often a life begins with another layout and pool than the last one."""

LONGEST_DRAIN_S = 5.0
DRAIN_POLL_S = 0.5
LONGEST_RENEWAL_S = 2.0
"""Members begin their lives with new weights one after the other, with such pauses at most."""


def draw_plans(random: Random, scheme: HashScheme) -> Iterator[MemberPlan]:
    """Yield instances that prefill and decode, of one model, and maybe stores, of another."""
    counts: dict[Role, int] = {
        "prefill": random.randrange(3),
        "decode": random.randrange(2, 4),
        "store": random.choice([0, 1, 2]),
    }
    for role, count in counts.items():
        for index in range(count):
            layout = Layout(block_tokens=scheme.hash_block_tokens)
            plan = MemberPlan(
                instance_id=InstanceId(f"{role}-{index}"),
                role=role,
                identity=identity_of("outside" if role == "store" else "inside", FIRST_WEIGHTS),
                scheme=scheme,
                layout=layout,
                num_blocks=draw_pool(random, layout),
                max_model_len=MAX_MODEL_LEN,
            )
            yield plan if role == "store" else with_other_layout(plan, random)


def with_other_layout(plan: MemberPlan, random: Random) -> MemberPlan:
    """Return the plan with a layout of any kind, and a pool for that."""
    hash_block_tokens = plan.scheme.hash_block_tokens
    tokens = hash_block_tokens * random.choice([1, 1, LARGEST_BLOCK_HASHES])
    layout = Layout(block_tokens=tokens)
    if random.random() >= ONE_RANK:
        dealt = partial(grid, block_tokens=tokens // 2, interleave=random.choice([1, 2]))
        layout = random.choice(
            [
                grid(block_tokens=tokens, tp=2),
                grid(block_tokens=tokens, pp=2),
                dealt(dcp=2),
                dealt(pcp=2),
            ]
        )
    return replace(plan, layout=layout, num_blocks=draw_pool(random, layout))


def draw_pool(random: Random, layout: Layout) -> int:
    """Return a number of blocks that one request fits in, and not many."""
    least = MAX_MODEL_LEN // layout.virtual_block_tokens + 1
    return least + random.randrange(0, least)


class Population:
    """All members, and the clients of the stores; each in its present life.

    Args:
        network: between all of them.
        scheme: how they hash.
        coordinators: whom they know.
        operator: the process that starts lives.
        clock_skew: how wrong clocks may go.
        told: hears of engines that have begun.
    """

    def __init__(
        self,
        network: Network,
        scheme: HashScheme,
        *,
        coordinators: Coordinators,
        operator: Process,
        clock_skew: float,
        told: Callable[[Instance], None],
    ) -> None:
        random = network.world.random
        self.lives: dict[InstanceId, Member] = {}
        self.clients: list[Client] = []
        self.saves: list[Saves] = []
        self.num_crashes = 0
        self.num_renewals = 0
        self.num_sharded_lives = 0
        self.weights = FIRST_WEIGHTS
        self._network = network
        self._world = network.world
        self._scheme = scheme
        self._coordinators = coordinators
        self._operator = operator
        self._clock_skew = clock_skew
        self._told = told
        self._plans = {plan.instance_id: plan for plan in draw_plans(random, scheme)}
        self._incarnations = dict.fromkeys(self._plans, 0)
        self._served: dict[str, Served] = {}

    def start(self) -> None:
        """Begin all first lives; in a task of the operator."""
        for instance_id in self._plans:
            self._begin(instance_id)
        self._begin_clients()

    def renew(self) -> None:
        """Let all members have new weights, one after the other; in a task of the operator."""
        self.num_renewals += 1
        self.weights += 1
        self._begin_clients()
        for instance_id, plan in self._plans.items():
            life = self.lives.get(instance_id)
            if life is not None and life.plan.identity != identity_of(
                plan.identity.model, self.weights
            ):
                self._end(life)
            self._world.sleep(self._world.random.random() * LONGEST_RENEWAL_S)

    def drain(self) -> None:
        """Drain a member and let its next life begin; in a task of the operator."""
        if not self.lives:
            return
        random = self._world.random
        life = random.choice(list(self.lives.values()))
        deadline_s = LONGEST_DRAIN_S * (0.1 + 0.9 * random.random())
        coordinators = self._coordinators
        command = Drain(
            instance_id=life.plan.instance_id, incarnation=life.incarnation, deadline_s=deadline_s
        )
        while self.is_current(life):
            with suppress(KvferryError):
                told = self._network.call(
                    coordinators.process, lambda: coordinators.handle(command), timeout_s=2.0
                )
                if expect(told, Drained).is_over:
                    self._end(life)
            self._world.sleep(DRAIN_POLL_S)

    def victims(self) -> list["Victim"]:
        """Return the members that live."""
        return [Victim(self, life) for life in self.lives.values()]

    def crash(self, life: Member) -> None:
        """End one process of a life where it stands, which ends the others."""
        self.num_crashes += 1
        part = self._world.random.choice(life.parts)
        if part.rank == 0:
            self._end(life)
        else:
            self._world.kill(part.process)  # rank 0 has to find that out

    def take_for_dead(self, life: Member) -> None:
        """Begin the next life of a member while the last one goes on."""
        del self.lives[life.plan.instance_id]
        self._begin(life.plan.instance_id)

    def is_current(self, life: Member) -> bool:
        """Tell whether it is the life that others should know."""
        return self.lives.get(life.plan.instance_id) is life

    def _begin(self, instance_id: InstanceId) -> None:
        self._incarnations[instance_id] += 1
        plan, random = self._next_plan(instance_id), self._world.random
        incarnation = Incarnation(self._incarnations[instance_id])
        life: Member
        if plan.role == "store":
            life = Store(self._birth(plan, incarnation))
        else:
            life = Instance(
                self._birth(plan, incarnation),
                token_budget=random.choice([8, 16, 64]),
                max_running=random.choice([2, 4, 8]),
            )
        self.lives[instance_id] = life
        self._serve(life)
        self.num_sharded_lives += len(life.parts) > 1
        self._world.spawn(lambda: self._live(life), life.process)

    def _next_plan(self, instance_id: InstanceId) -> MemberPlan:
        """Return what the next life is: under the present weights, maybe of another layout."""
        plan, random = self._plans[instance_id], self._world.random
        is_first = self._incarnations[instance_id] == 1
        if not is_first and plan.role != "store" and random.random() < OTHER_LAYOUT:
            plan = with_other_layout(plan, random)
        plan = replace(plan, identity=identity_of(plan.identity.model, self.weights))
        self._plans[instance_id] = plan
        return plan

    def _serve(self, life: Member) -> None:
        self._served.update((part.address, part.served) for part in life.parts)

    def _live(self, life: Member) -> None:
        try:
            life.join()
            if isinstance(life, Instance):
                self._told(life)
            life.watch()
        except (StaleError, DrainedError):
            pass  # a later life was faster, or this one was told to go
        self._world.spawn(lambda: self._end(life), self._operator)

    def _end(self, life: Member) -> None:
        """End a life, as it stands; the next one begins unless it has already."""
        self._world.kill(life.process)
        if self.is_current(life):
            name = life.plan.instance_id
            del self.lives[name]
            self._world.spawn(lambda: self._begin(name), self._operator, after_s=RESTART_S)

    def _begin_clients(self) -> None:
        """End the clients, if there are, and begin those of the present weights."""
        if not any(plan.role == "store" for plan in self._plans.values()):
            return
        for client in self.clients:
            self._world.kill(client.process)
        saves = Saves()
        self.saves.append(saves)
        prompts = prompts_for_clients(self._world.random, MAX_MODEL_LEN)
        layout = Layout(block_tokens=self._scheme.hash_block_tokens)
        self.clients = [
            self._begin_client(
                MemberPlan(
                    instance_id=InstanceId(f"client-{index}"),
                    role="decode",
                    identity=identity_of("outside", self.weights),
                    scheme=self._scheme,
                    layout=layout,
                    num_blocks=MAX_MODEL_LEN // layout.virtual_block_tokens + 1,
                    max_model_len=MAX_MODEL_LEN,
                ),
                prompts,
                saves,
            )
            for index in range(2)
        ]

    def _begin_client(
        self, plan: MemberPlan, prompts: Sequence[tuple[int, ...]], saves: Saves
    ) -> Client:
        client = Client(
            self._birth(plan, Incarnation(self.weights)),
            stores=self._stores,
            prompts=prompts,
            saves=saves,
            pause_s=CLIENT_PAUSE_S,
        )
        self._serve(client)
        self._world.spawn(client.join, client.process)
        return client

    def _stores(self) -> list[Served]:
        return [life.parts[0].served for life in self.lives.values() if isinstance(life, Store)]

    def _birth(self, plan: MemberPlan, incarnation: Incarnation) -> Birth:
        random = self._world.random

        def process_of_rank(rank: int) -> Process:
            return Process(
                f"{plan.instance_id}:{incarnation}/{rank}",
                clock_offset_s=1000.0 * random.random(),
                clock_rate=1.0 + self._clock_skew * (2 * random.random() - 1),
            )

        fetcher = FetchClient(
            self._network,
            self._served,
            frame_bytes=random.choice([16, 64, 100, 4096]),
            shared=0.5,
        )
        return Birth(
            network=self._network,
            plan=plan,
            incarnation=incarnation,
            process_of_rank=process_of_rank,
            fetcher=fetcher,
            coordinators=self._coordinators,
        )


@dataclass(frozen=True, slots=True)
class Victim:
    """A member in its present life, to which something is about to happen."""

    population: Population
    life: Member

    def crash(self) -> None:
        """End one process of it where it stands."""
        self.population.crash(self.life)

    def take_for_dead(self) -> None:
        """Replace it while it goes on."""
        self.population.take_for_dead(self.life)
