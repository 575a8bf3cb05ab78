"""What engine instances and stores have in common: processes, workers, and a registration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.cluster.sim.coordinators import Coordinators
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.world import Process
from kvferry.proto.errors import InvariantError, KvferryError
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
from kvferry.worker.pull import PullOutcome
from kvferry.worker.residency import Resident
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import FetchAsk

NUM_LAYERS = 2
NUM_HEADS = 2
HEAD_SIZE = 2
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5


def identity_of(model: str, weights: int) -> Identity:
    """Return the identity of a simulated model under weights of some number."""
    return Identity(
        model=model,
        weight_version=str(weights),
        weight_dtype="float32",
        kv_dtype="float32",
        kv_scales="",
        rope="",
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
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
    layout: Layout
    num_blocks: int
    max_model_len: int


class SimWorker(WorkerService):
    """Offers its memory to whoever may map it: all are on one host.

    Args:
        violated: hears of what only a broken kvferry does in a pull, which whoever asked for it
            takes for a peer's failure.
        parts: as `WorkerService`.
    """

    def __init__(self, violated: Callable[[Exception], None], **parts: Any) -> None:
        super().__init__(**parts)
        self._violated = violated

    def pull(self, **asked: Any) -> PullOutcome:
        """As `WorkerService.pull`."""
        try:
            outcome = super().pull(**asked)
        except Exception as error:
            if not isinstance(error, KvferryError) or isinstance(error, InvariantError):
                self._violated(error)
            raise
        if outcome.error_type == InvariantError.__name__:
            self._violated(InvariantError(f"in a pull: {outcome.error}"))
        return outcome

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
    process_of_rank: Callable[[int], Process]
    fetcher: FetchClient
    coordinators: Coordinators


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank of a life: its process, its worker, and where peers reach it."""

    rank: int
    process: Process
    worker: SimWorker
    address: str

    @property
    def served(self) -> Served:
        """As others find it."""
        return Served(self.process, self.worker)


class Member:
    """One life of a member: a process with a worker for each rank.

    They end with that of rank 0, which is `process`, as `worker` is its worker.
    """

    def __init__(self, birth: Birth) -> None:
        plan, incarnation = birth.plan, birth.incarnation
        self.plan = plan
        self.incarnation = incarnation
        self.network = birth.network
        self._birth = birth
        self.parts = [_part(birth, rank) for rank in range(plan.layout.num_ranks)]
        self.process = self.parts[0].process
        self.worker = self.parts[0].worker
        self.name = f"{plan.instance_id}:{incarnation}"
        self.info = InstanceInfo(
            instance_id=plan.instance_id,
            role=plan.role,
            incarnation=incarnation,
            identity=plan.identity,
            scheme=plan.scheme,
            layout=plan.layout,
            num_blocks=plan.num_blocks,
            rank_addresses=tuple(part.address for part in self.parts),
            max_model_len=plan.max_model_len,
            rank_pids=tuple(range(1, 1 + len(self.parts))),
            version="simulated",
        )
        for part in self.parts[1:]:
            self.process.at_end.append(partial(self.network.world.kill, part.process))

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
        command = RegisterInstance(call_id=f"register/{self.name}", info=self.info)
        while True:
            try:
                return expect(self.call(command), Registered)
            except KvferryError as error:
                if not error.retryable:
                    raise
                self.network.world.sleep(RETRY_S)


def _part(birth: Birth, rank: int) -> Part:
    plan = birth.plan
    memory = KvMemory(
        open_device("cpu"),
        plan.identity,
        num_blocks=plan.num_blocks,
        layout=plan.layout,
        rank=rank,
    )
    worker = SimWorker(
        birth.network.world.fail,
        incarnation=birth.incarnation,
        memory=memory,
        fetcher=birth.fetcher,
    )
    process = birth.process_of_rank(rank)
    return Part(rank=rank, process=process, worker=worker, address=process.name)
