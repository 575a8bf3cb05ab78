"""The ranks of a simulated instance: the real ranks, each in a process of its own, as in Ray."""

from collections.abc import Callable, Sequence
from typing import Any

from kvferry.cluster.serving.all_ranks import AllRanks
from kvferry.cluster.serving.pool_size import KvSize
from kvferry.cluster.serving.rank import Rank, RankSettings
from kvferry.cluster.serving.sequence import Run
from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.content import StateModel
from kvferry.cluster.sim.members import MemberPlan, Part
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.world import Process
from kvferry.proto.errors import (
    DeadlineError,
    InstanceDiedError,
    InvariantError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.ids import RequestId

RANK_TIMEOUT_S = 3.0


class SimRank(Rank):
    """The real rank, around a model of states and a worker that the network knows.

    Args:
        plan: of the instance.
        part: which rank this is, with its worker.
        violated: as `StateModel`.
    """

    def __init__(self, plan: MemberPlan, part: Part, violated: Callable[[Exception], None]) -> None:
        super().__init__(_settings(plan, part.rank), lambda: part.address)
        self._worker = part.worker
        self.model = StateModel(part.worker.memory, violated)

    def compute(self, runs: tuple[Run, ...]) -> dict[RequestId, int]:
        """Write this rank's share of a pass; return the next token of each run that samples."""
        return self.model.forward(runs)


class SimRanks(AllRanks):
    """The real `AllRanks`, but for the model, which needs to know of requests."""

    def __init__(self, own: SimRank, others: Sequence["SimPort"]) -> None:
        super().__init__(own, others, pass_timeout_s=RANK_TIMEOUT_S)
        self._own_model = own

    def forward(self, runs: tuple[Run, ...]) -> dict[RequestId, int]:
        """As `AllRanks.forward`."""
        calls = self._begin("compute", runs)
        sampled = self._own_model.compute(runs)
        self._wait(calls, RANK_TIMEOUT_S)
        return sampled


class SimPort:
    """`RankPort`: calls of another rank, made by tasks of the process of rank 0."""

    def __init__(self, network: Network, process: Process, rank: SimRank) -> None:
        self._network = network
        self._process = process
        self._rank = rank

    def begin(self, method: str, *arguments: Any) -> "SimCall":
        """Call a method of the rank."""
        call = SimCall(self._network, self._process.name)

        def run() -> None:
            try:
                call.value = self._network.call(
                    self._process,
                    lambda: getattr(self._rank, method)(*arguments),
                    timeout_s=None,
                    reliable=True,
                )
            except UnavailableError as error:
                call.error = InstanceDiedError(f"rank {self._process.name} died: {error}")
            except KvferryError as error:
                call.error = error
            call.ended.set()

        self._network.world.spawn(run)
        return call


class SimCall:
    """`PendingCall`: a call of a rank that is under way."""

    def __init__(self, network: Network, who: str) -> None:
        self.ended = Event(network.world)
        self.value: Any = None
        self.error: KvferryError | None = None
        self._who = who

    def done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for its end, and tell whether it has come."""
        return self.ended.wait(timeout_s)

    def result(self, timeout_s: float) -> Any:
        """As `PendingCall.result`."""
        if not self.ended.wait(timeout_s):
            raise DeadlineError(f"rank {self._who} did not answer", allowed=f"{timeout_s:g} s")
        if self.error is not None:
            raise self.error
        return self.value


def _settings(plan: MemberPlan, rank: int) -> RankSettings:
    """Return what the launcher would tell the rank; nothing of it is asked for here."""
    if not 0 <= rank < plan.layout.num_ranks:
        raise InvariantError("no such rank", given=rank, allowed=plan.layout.num_ranks)
    return RankSettings(
        instance_id=plan.instance_id,
        role=plan.role,
        model=plan.identity.model,
        dtype=plan.identity.kv_dtype,
        device="cpu",
        layout=plan.layout,
        rank=rank,
        hash_block_tokens=plan.scheme.hash_block_tokens,
        kv_size=KvSize(num_blocks=plan.num_blocks),
        max_model_len=plan.max_model_len,
        token_budget=1,
        max_running=1,
        policy="fcfs",
        algorithm=plan.scheme.algorithm,
        key_format=plan.scheme.key_format,
        bind="simulated",
        insecure=True,
        rank_timeout_s=RANK_TIMEOUT_S,
    )
