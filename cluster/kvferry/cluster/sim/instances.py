"""An engine instance in the simulator: the real engine, ranks and workers; a model of states."""

from functools import partial

from kvferry.cluster.serving.engine import Engine
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.serving.rank_actor import watch_rank
from kvferry.cluster.sim.content import Cells, StateModel
from kvferry.cluster.sim.members import Birth, Member
from kvferry.cluster.sim.ranks import RANK_TIMEOUT_S, SimPort, SimRank, SimRanks
from kvferry.proto.errors import (
    DeadlineError,
    DrainedError,
    InstanceDiedError,
    KvferryError,
    StaleError,
    UnavailableError,
)
from kvferry.proto.group_specs import specs_of

WATCH_S = 1.0


class Instance(Member):
    """One life of an instance that computes.

    Args:
        birth: as `Member`.
        token_budget, max_running: as `Limits`.
    """

    def __init__(self, birth: Birth, *, token_budget: int, max_running: int) -> None:
        super().__init__(birth)
        plan = self.plan
        block_tokens = plan.layout.virtual_block_tokens
        self._limits = Limits(
            num_blocks=plan.num_blocks,
            block_tokens=block_tokens,
            max_model_len=plan.max_model_len,
            token_budget=token_budget,
            max_running=max_running,
            specs=specs_of(plan.identity, block_tokens),
        )
        violated = self.network.world.fail
        self._ranks = [SimRank(plan, part, violated) for part in self.parts]
        self.engine: Engine | None = None

    @property
    def cells(self) -> list[Cells]:
        """What lies where, by rank."""
        return [rank.model.cells for rank in self._ranks]

    @property
    def model(self) -> StateModel:
        """That of rank 0."""
        return self._ranks[0].model

    @property
    def _ends(self) -> tuple[type[KvferryError], ...]:
        """What a loop may end with: others took its place, or a rank of several was lost."""
        had_to_go = StaleError, DrainedError
        return had_to_go if len(self.parts) == 1 else (*had_to_go, UnavailableError, DeadlineError)

    def join(self) -> None:
        """Register, and start the engine."""
        registered = self.register()
        own, *others = self._ranks
        ports = [
            SimPort(self.network, part.process, rank)
            for part, rank in zip(self.parts[1:], others, strict=True)
        ]
        ranks = SimRanks(own, ports)
        engine = self.engine = Engine(
            info=self.info,
            registered=registered,
            limits=self._limits,
            scheme=self.plan.scheme,
            eos_token_ids=frozenset(),
            coordinator=self,
            mover=ranks,
            forward=ranks.forward,
        )
        engine.start()
        for number, port in enumerate(ports, start=1):
            self.network.world.spawn(
                partial(watch_rank, engine, number, port, RANK_TIMEOUT_S), self.process
            )

    def watch(self) -> None:
        """Return once the engine's loop has failed.

        That another life is registered ends a loop, or that this one was drained, or that a rank is
        gone or silent; anything else is told to the world.
        """
        assert self.engine is not None
        while True:
            self.network.world.sleep(WATCH_S)
            try:
                self.engine.require_alive()
            except InstanceDiedError as death:
                if not isinstance(death.__cause__, self._ends):
                    self.network.world.fail(death)
                return
