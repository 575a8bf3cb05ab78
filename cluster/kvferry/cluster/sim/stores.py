"""A store in the simulator: a worker that takes blocks from engines outside, and serves them."""

from functools import partial

from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.members import Birth, Member
from kvferry.cluster.store_watch import BEAT_TIMEOUT_S, StoreWatch
from kvferry.proto.messages import Command, Heard, Reply
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.returning import come_back


class Store(Member):
    """One life of a store; it comes back to a coordinator that does not know it."""

    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        self._reserver: CoordinatorReserver | None = None
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
        StoreWatch(lambda: [self])

    def watch(self) -> None:
        """Wait for ever: a store goes on until it is ended."""
        Event(self.network.world).wait()

    def beat(self) -> Heard:
        """See `WatchedStore.beat`."""
        assert self._reserver is not None
        return self._reserver.beat(partial(self.call, timeout_s=BEAT_TIMEOUT_S))

    def come_back(self) -> None:
        """See `WatchedStore.come_back`."""
        assert self._reserver is not None
        self._num_returns += 1
        come_back(
            self._call,
            self.info,
            self._num_returns,
            reserver=self._reserver,
            residency=self.worker.residency,
        )

    def _call(self, command: Command) -> Reply:
        return self.call(command)
