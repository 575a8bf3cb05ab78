"""An engine instance in the simulator: the real engine and worker, around a model of states."""

from kvferry.cluster.serving.engine import Engine
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.sim.content import StateModel
from kvferry.cluster.sim.members import Birth, Member
from kvferry.proto.errors import InstanceDiedError
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
        self._limits = Limits(
            num_blocks=plan.num_blocks,
            block_tokens=plan.block_tokens,
            max_model_len=plan.max_model_len,
            token_budget=token_budget,
            max_running=max_running,
            specs=specs_of(plan.identity, plan.block_tokens),
        )
        self._model = StateModel(self.worker.memory, self.network.world.fail)
        self.engine: Engine | None = None

    def join(self) -> None:
        """Register, and start the engine."""
        registered = self.register()
        self.engine = Engine(
            info=self.info,
            registered=registered,
            limits=self._limits,
            scheme=self.plan.scheme,
            eos_token_ids=frozenset(),
            coordinator=self,
            mover=self.worker,
            forward=self._model.forward,
        )
        self.engine.start()

    def watch(self) -> None:
        """Return once the engine's loop has failed.

        That another life is registered ends a loop; anything else is told to the world.
        """
        assert self.engine is not None
        while True:
            self.network.world.sleep(WATCH_S)
            try:
                self.engine.require_alive()
            except InstanceDiedError as error:
                if "StaleError" not in error.message:
                    self.network.world.fail(error)
                return
