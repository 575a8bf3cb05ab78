"""A store in the simulator: a worker that takes blocks from engines outside, and serves them."""

from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.members import Member
from kvferry.proto.messages import Command, Reply
from kvferry.worker.coordinator_reserver import CoordinatorReserver


class Store(Member):
    """One life of a store."""

    def join(self) -> None:
        """Register, and take blocks from then on."""
        registered = self.register()

        def call(command: Command) -> Reply:
            return self.call(command)

        self.worker.reserver = CoordinatorReserver(
            call,
            instance_id=self.plan.instance_id,
            incarnation=self.incarnation,
            epoch=registered.epoch,
        )

    def watch(self) -> None:
        """Wait for ever: a store goes on until it is ended."""
        Event(self.network.world).wait()
