"""What engine instances and stores have in common: a process, a worker, and a registration."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cluster.sim.content import Values
from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.world import Process
from kvferry.proto.errors import KvferryError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import (
    Command,
    InstanceInfo,
    Registered,
    RegisterInstance,
    Reply,
    Role,
    expect,
)
from kvferry.proto.scheme import HashScheme
from kvferry.worker.device import open_device
from kvferry.worker.frames import SharedOffer
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.residency import Resident
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import FetchAsk

NUM_LAYERS = 2
HEAD_SIZE = 2
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5


def identity_of(model: str, weight_version: str = "1") -> Identity:
    """Return the identity of a simulated model under some weights."""
    return Identity(
        model=model,
        weight_version=weight_version,
        weight_dtype="float32",
        kv_dtype="float32",
        kv_scales="",
        rope="",
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_size=HEAD_SIZE,
        groups=(GroupSpec(kind="full", layers=tuple(range(NUM_LAYERS))),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """What a member is in all its lives; sizes in blocks and tokens."""

    instance_id: InstanceId
    role: Role
    identity: Identity
    scheme: HashScheme
    block_tokens: int
    num_blocks: int
    max_model_len: int


class SimWorker(WorkerService):
    """Offers its memory to whoever may map it: all are on one host."""

    def _shared_offer(self, ask: FetchAsk, residents: Sequence[Resident]) -> SharedOffer | None:
        if "shm" not in ask.paths:
            return None
        return SharedOffer(
            socket="simulated",
            block_ids=tuple(resident.block_id for resident in residents),
            generations=tuple(resident.generation for resident in residents),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What a life is given: who it is, where it lives, and whom it knows."""

    network: Network
    plan: MemberPlan
    incarnation: Incarnation
    process: Process
    fetcher: FetchClient
    coordinators: Coordinators


class Member:
    """One life of a member: a process with a worker."""

    def __init__(self, birth: Birth) -> None:
        plan, incarnation = birth.plan, birth.incarnation
        self.plan = plan
        self.incarnation = incarnation
        self.process = birth.process
        self.address = f"{plan.instance_id}:{incarnation}"
        self.network = birth.network
        self._birth = birth
        memory = KvMemory(
            open_device("cpu"),
            plan.identity,
            num_blocks=plan.num_blocks,
            layout=Layout(block_tokens=plan.block_tokens),
        )
        self.worker = SimWorker(incarnation=incarnation, memory=memory, fetcher=birth.fetcher)
        self.served = Served(birth.process, self.worker)
        self.info = InstanceInfo(
            instance_id=plan.instance_id,
            role=plan.role,
            incarnation=incarnation,
            identity=plan.identity,
            scheme=plan.scheme,
            layout=memory.layout,
            num_blocks=plan.num_blocks,
            rank_addresses=(self.address,),
            max_model_len=plan.max_model_len,
            rank_pids=(1,),
            version="simulated",
        )
        self.layers: list[Values] = [layer.numpy() for layer in memory.layers]

    def join(self) -> None:
        """Register and begin; in a task of the process."""
        raise NotImplementedError

    def watch(self) -> None:
        """Return once this life cannot go on; in a task of the process."""
        raise NotImplementedError

    def call(self, command: Command, *, timeout_s: float = CALL_TIMEOUT_S) -> Reply:
        """`CoordinatorPort`."""
        coordinators = self._birth.coordinators
        return self.network.call(
            coordinators.process, lambda: coordinators.handle(command), timeout_s=timeout_s
        )

    def register(self) -> Registered:
        """Register, as often as it takes.

        Raises:
            KvferryError: what cannot be repeated.
        """
        command = RegisterInstance(call_id=f"register/{self.address}", info=self.info)
        while True:
            try:
                return expect(self.call(command), Registered)
            except KvferryError as error:
                if not error.retryable:
                    raise
                self.network.world.sleep(RETRY_S)
