"""A store in the simulator: a worker that takes blocks from engines outside, and serves them."""

from functools import partial

from kvferry.cluster.serving.pulse import BEAT_TIMEOUT_S
from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.members import Birth, Member
from kvferry.cluster.store_watch import StoreWatch
from kvferry.proto.errors import DrainedError
from kvferry.proto.messages import Command, Heard, Reply
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.returning import come_back
from kvferry.worker.store_moves import StoreMoves


class Store(Member):
    """One life of a store; it comes back to a coordinator that does not know it."""

    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        self._reserver: CoordinatorReserver | None = None
        self._moves: StoreMoves | None = None
        self._was_drained = Event(self.network.world)
        self._num_returns = 0

    def join(self) -> None:
        """Register, and take blocks from then on."""
        registered = self.register()
        self.worker.residency.reset(registered.num_resets)
        self._reserver = self.worker.reserver = CoordinatorReserver(
            self._call,
            instance_id=self.plan.instance_id,
            incarnation=self.incarnation,
            epoch=registered.epoch,
        )
        watch = StoreWatch(lambda: [self])
        self._moves = StoreMoves(self.worker, self._reserver, watch.look)

    def watch(self) -> None:
        """Return once the store was drained."""
        self._was_drained.wait()

    def beat(self) -> Heard:
        """See `WatchedStore.beat`."""
        assert self._reserver is not None
        heard = self._reserver.beat(partial(self.call, timeout_s=BEAT_TIMEOUT_S))
        if self._moves is not None:
            self._moves.begin(heard.moves)
        return heard

    def come_back(self) -> None:
        """See `WatchedStore.come_back`."""
        assert self._reserver is not None
        self._num_returns += 1
        try:
            come_back(
                self._call,
                self.info,
                self._num_returns,
                reserver=self._reserver,
                residency=self.worker.residency,
            )
        except DrainedError:
            self._was_drained.set()

    def _call(self, command: Command) -> Reply:
        return self.call(command)
