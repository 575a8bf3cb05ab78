"""An engine instance in the simulator: the real engine and worker, around a model of states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cluster.serving.engine import Engine
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.sim.content import StateModel
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.world import Process
from kvferry.proto.errors import InstanceDiedError, KvferryError
from kvferry.proto.group_specs import specs_of
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
WATCH_S = 1.0
ENDS_A_LOOP = ("StaleError", "NotFoundError", "UnavailableError", "DeadlineError")


def identity_of(weight_version: str) -> Identity:
    """Return the identity of the simulated model under some weights."""
    return Identity(
        model="simulated",
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
class InstancePlan:
    """What an instance is in all its lives; sizes in blocks and tokens."""

    instance_id: InstanceId
    role: Role
    identity: Identity
    scheme: HashScheme
    block_tokens: int
    num_blocks: int
    max_model_len: int
    token_budget: int
    max_running: int

    def limits(self) -> Limits:
        """Return what its engine can take."""
        return Limits(
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            max_model_len=self.max_model_len,
            token_budget=self.token_budget,
            max_running=self.max_running,
            specs=specs_of(self.identity, self.block_tokens),
        )


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


class Instance:
    """One life of an instance: a process with an engine and a worker.

    Args:
        network: to everybody else.
        plan: which instance.
        incarnation: which life.
        process: where it lives.
        fetcher: of its worker.
        coordinator: executes a command in the coordinator's process.
        coordinator_process: where that is.
    """

    def __init__(
        self,
        network: Network,
        plan: InstancePlan,
        incarnation: Incarnation,
        process: Process,
        *,
        fetcher: FetchClient,
        coordinator: Callable[[Command], Reply],
        coordinator_process: Process,
    ) -> None:
        self.plan = plan
        self.incarnation = incarnation
        self.process = process
        self.address = f"{plan.instance_id}:{incarnation}"
        self._network = network
        self._coordinator = coordinator
        self._coordinator_process = coordinator_process
        memory = KvMemory(
            open_device("cpu"),
            plan.identity,
            num_blocks=plan.num_blocks,
            layout=Layout(block_tokens=plan.block_tokens),
        )
        self.model = StateModel(memory, network.world.fail)
        self.worker = SimWorker(incarnation=incarnation, memory=memory, fetcher=fetcher)
        self.served = Served(process, self.worker)
        self.engine: Engine | None = None

    def join(self) -> None:
        """Register, as often as it takes, and start the engine; in a task of the process."""
        plan, info = self.plan, self._info()
        registered = expect(self._register(info), Registered)
        self.engine = Engine(
            info=info,
            registered=registered,
            limits=plan.limits(),
            scheme=plan.scheme,
            eos_token_ids=frozenset(),
            coordinator=self,
            mover=self.worker,
            forward=self.model.forward,
        )
        self.engine.start()

    def watch(self) -> None:
        """Return once the engine's loop has failed; in a task of the process.

        What the other side of a network can do to a loop is to be expected; anything else is told
        to the world.
        """
        assert self.engine is not None
        while True:
            self._network.world.sleep(WATCH_S)
            try:
                self.engine.require_alive()
            except InstanceDiedError as error:
                if not any(name in error.message for name in ENDS_A_LOOP):
                    self._network.world.fail(error)
                return

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        """`CoordinatorPort`."""
        return self._network.call(
            self._coordinator_process, lambda: self._coordinator(command), timeout_s=timeout_s
        )

    def _info(self) -> InstanceInfo:
        return InstanceInfo(
            instance_id=self.plan.instance_id,
            role=self.plan.role,
            incarnation=self.incarnation,
            identity=self.plan.identity,
            scheme=self.plan.scheme,
            layout=self.worker.memory.layout,
            num_blocks=self.plan.num_blocks,
            rank_addresses=(self.address,),
            max_model_len=self.plan.max_model_len,
            rank_pids=(1,),
            version="simulated",
        )

    def _register(self, info: InstanceInfo) -> Reply:
        command = RegisterInstance(call_id=f"register/{self.address}", info=info)
        while True:
            try:
                return self.call(command, timeout_s=CALL_TIMEOUT_S)
            except KvferryError as error:
                if not error.retryable:
                    raise
                self._network.world.sleep(RETRY_S)
