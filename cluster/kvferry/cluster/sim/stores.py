"""A store in the simulator: a worker that takes blocks from engines outside, and serves them."""

from typing import TypeVar

from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.members import Birth, Member
from kvferry.cluster.store_watch import StoreWatch
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Command, Reply, expect
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.returning import come_back

_R = TypeVar("_R")


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
        StoreWatch(self, lambda: [self])

    def watch(self) -> None:
        """Wait for ever: a store goes on until it is ended."""
        Event(self.network.world).wait()

    def ask(self, command: Command, expected: type[_R]) -> _R:
        """As `ControlClient.ask`."""
        return expect(self.call(command), expected)

    def close(self) -> None:
        """As `ControlClient.close`."""

    def is_known(self, epoch: Epoch) -> bool:
        """See `WatchedStore.is_known`."""
        assert self._reserver is not None
        return self._reserver.knows(epoch)

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
