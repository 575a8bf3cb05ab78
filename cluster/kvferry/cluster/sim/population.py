"""Who lives in a simulated service: which members there are, and the lives they begin and end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvferry.cluster.sim.clients import Client, Saves, prompts_for_clients
from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.members import Birth, Member, MemberPlan, identity_of
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.stores import Store
from kvferry.cluster.sim.world import Process
from kvferry.proto.errors import StaleError
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.messages import Role
from kvferry.proto.scheme import HashScheme

MAX_MODEL_LEN = 64
RESTART_S = 0.5
CLIENT_PAUSE_S = 0.15
LARGEST_BLOCK_HASHES = 2


def draw_plans(random: Random, scheme: HashScheme) -> Iterator[MemberPlan]:
    """Yield instances that prefill and decode, of one model, and maybe stores, of another."""
    counts: dict[Role, int] = {
        "prefill": random.randrange(3),
        "decode": random.randrange(2, 4),
        "store": random.choice([0, 1, 2]),
    }
    for role, count in counts.items():
        for index in range(count):
            covered = 1 if role == "store" else random.choice([1, 1, LARGEST_BLOCK_HASHES])
            block_tokens = covered * scheme.hash_block_tokens
            least = MAX_MODEL_LEN // block_tokens + 1
            yield MemberPlan(
                instance_id=InstanceId(f"{role}-{index}"),
                role=role,
                identity=identity_of("outside" if role == "store" else "inside"),
                scheme=scheme,
                block_tokens=block_tokens,
                num_blocks=least + random.randrange(0, least),
                max_model_len=MAX_MODEL_LEN,
            )


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
        self.saves = Saves()
        self.num_crashes = 0
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
        if any(plan.role == "store" for plan in self._plans.values()):
            self._begin_clients()

    def victims(self) -> list["Victim"]:
        """Return the members that live."""
        return [Victim(self, life) for life in self.lives.values()]

    def crash(self, life: Member) -> None:
        """End a life where it stands."""
        self.num_crashes += 1
        self._end(life)

    def take_for_dead(self, life: Member) -> None:
        """Begin the next life of a member while the last one goes on."""
        del self.lives[life.plan.instance_id]
        self._begin(life.plan.instance_id)

    def is_current(self, life: Member) -> bool:
        """Tell whether it is the life that others should know."""
        return self.lives.get(life.plan.instance_id) is life

    def _begin(self, instance_id: InstanceId) -> None:
        self._incarnations[instance_id] += 1
        plan, random = self._plans[instance_id], self._world.random
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
        self._served[life.address] = life.served
        self._world.spawn(lambda: self._live(life), life.process)

    def _live(self, life: Member) -> None:
        try:
            life.join()
            if isinstance(life, Instance):
                self._told(life)
            life.watch()
        except StaleError:
            pass  # a later life was faster
        self._world.spawn(lambda: self._end(life), self._operator)

    def _end(self, life: Member) -> None:
        """End a life, as it stands; the next one begins unless it has already."""
        self._world.kill(life.process)
        if self.is_current(life):
            name = life.plan.instance_id
            del self.lives[name]
            self._world.spawn(lambda: self._begin(name), self._operator, after_s=RESTART_S)

    def _begin_clients(self) -> None:
        prompts = prompts_for_clients(self._world.random, MAX_MODEL_LEN)
        for index in range(2):
            plan = MemberPlan(
                instance_id=InstanceId(f"client-{index}"),
                role="decode",
                identity=identity_of("outside"),
                scheme=self._scheme,
                block_tokens=self._scheme.hash_block_tokens,
                num_blocks=MAX_MODEL_LEN // self._scheme.hash_block_tokens + 1,
                max_model_len=MAX_MODEL_LEN,
            )
            client = Client(
                self._birth(plan, Incarnation(1)),
                stores=self._stores,
                prompts=prompts,
                saves=self.saves,
                pause_s=CLIENT_PAUSE_S,
            )
            self.clients.append(client)
            self._served[client.address] = client.served
            self._world.spawn(client.join, client.process)

    def _stores(self) -> list[Served]:
        return [life.served for life in self.lives.values() if isinstance(life, Store)]

    def _birth(self, plan: MemberPlan, incarnation: Incarnation) -> Birth:
        random = self._world.random
        process = Process(
            f"{plan.instance_id}:{incarnation}",
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
            process=process,
            fetcher=fetcher,
            coordinators=self._coordinators,
        )


@dataclass(frozen=True, slots=True)
class Victim:
    """A member in its present life, to which something is about to happen."""

    population: Population
    life: Member

    def crash(self) -> None:
        """End it where it stands."""
        self.population.crash(self.life)

    def take_for_dead(self) -> None:
        """Replace it while it goes on."""
        self.population.take_for_dead(self.life)
