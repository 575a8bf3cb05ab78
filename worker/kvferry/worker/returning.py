"""How a store comes back to a coordinator that does not know what it holds any more."""

from kvferry.proto.errors import BusyError
from kvferry.proto.messages import Done, InstanceInfo, Registered, RegisterInstance, expect
from kvferry.proto.restore_messages import MAX_RESTORED_BLOCKS, RestoreBlocks, RestoreRequests
from kvferry.worker.coordinator_reserver import Call, CoordinatorReserver
from kvferry.worker.inventory import inventory_parts
from kvferry.worker.residency import Residency


def come_back(
    call: Call,
    info: InstanceInfo,
    attempt: int,
    *,
    reserver: CoordinatorReserver,
    residency: Residency,
) -> int:
    """Register a store again, tell what it holds, and let it take stores; return so many blocks.

    What is being written goes on and is told as well. May be repeated until it succeeds.

    Args:
        call: reaches the coordinator.
        info: as the store has registered before.
        attempt: another number each time.
        reserver: the store's.
        residency: what the store holds.

    Raises:
        BusyError: somebody is still writing into the store; every writer has a deadline.
        StaleError: another life of the store is registered, or a reset came in between.
        KvferryError: the coordinator refused, or does not answer.
    """
    reserver.leave()
    if not reserver.is_quiet():
        raise BusyError(f"{info.instance_id} is still written into")
    call_id = f"{info.instance_id}/{info.incarnation}/return-{attempt}"
    command = RegisterInstance(call_id=call_id, info=info, returning=True)
    registered = expect(call(command), Registered)
    residency.reset(registered.num_resets)
    num_blocks = 0
    for number, part in enumerate(inventory_parts(residency, MAX_RESTORED_BLOCKS)):
        restore = RestoreBlocks(
            call_id=f"{call_id}/{number}",
            epoch=registered.epoch,
            instance_id=info.instance_id,
            incarnation=info.incarnation,
            registration=call_id,
            group_id=part.group_id,
            hashes=tuple(part.hashes),
            block_ids=tuple(part.block_ids),
            num_resets=registered.num_resets,
        )
        expect(call(restore), Done)
        num_blocks += len(part.block_ids)
    last = RestoreRequests(
        call_id=call_id,
        epoch=registered.epoch,
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        registration=call_id,
    )
    expect(call(last), Done)
    reserver.enter(registered.epoch)
    return num_blocks
