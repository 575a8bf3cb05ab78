"""A coordinator that answers as it is told, and a reserver before it."""

from collections.abc import Callable

from kvferry.proto.ids import BlockId, Epoch, Incarnation, InstanceId, LeaseId
from kvferry.proto.messages import Command, Done, Reply, Reserve, Reserved
from kvferry.worker.coordinator_reserver import CoordinatorReserver


class FakeCoordinator:
    def __init__(self, answer: Callable[[Command], Reply]) -> None:
        self.commands: list[Command] = []
        self.answer = answer

    def __call__(self, command: Command) -> Reply:
        self.commands.append(command)
        return self.answer(command)


def reserving(command: Command) -> Reply:
    if isinstance(command, Reserve):
        block_ids = tuple(BlockId(i + 1) for i in range(len(command.hashes)))
        return Reserved(reservation_id=LeaseId("r9"), block_ids=block_ids, num_resets=5)
    return Done(changed=True)


def new_reserver(
    coordinator: FakeCoordinator, on_lost: Callable[[], None] = lambda: None
) -> CoordinatorReserver:
    return CoordinatorReserver(
        coordinator,
        instance_id=InstanceId("store-0"),
        incarnation=Incarnation(7),
        epoch=Epoch(3),
        on_lost=on_lost,
    )
