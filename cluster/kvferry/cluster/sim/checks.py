"""What must hold after every step, beside what the coordinator checks of itself."""

from collections.abc import Mapping, Sequence
from random import Random

from kvferry.cluster.sim.content import KnownContent
from kvferry.cluster.sim.instances import Instance
from kvferry.cluster.sim.members import Member
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import InstanceId, unpack_group

LOOKED_AT = 0.25


def check_residency(
    service: CoordinatorService, life: Member, known: KnownContent, random: Random
) -> None:
    """Findable means written: what the coordinator finds at a member, each of its ranks holds.

    At times the bytes of one block of an instance that computes are looked at, too.

    Raises:
        InvariantError: naming the block.
    """
    member = service.state.instances.get(life.plan.instance_id)
    if member is None or member.info.incarnation != life.incarnation:
        return
    found = list(member.manager.pool.index_items())
    findable = {block_id: key for key, block_ids in found for block_id in block_ids}
    for part in life.parts:
        resident = dict(zip(*part.worker.residency.inventory(), strict=True))
        if not findable.items() <= resident.items():
            block_id, key = min(findable.items() - resident.items())
            raise InvariantError(
                f"{part.address}: block {block_id} is findable and not resident",
                given=resident.get(block_id),
                allowed=key,
            )
    if found and isinstance(life, Instance) and random.random() < LOOKED_AT:
        key, block_ids = random.choice(found)
        block_id, (block_hash, _) = random.choice(block_ids), unpack_group(key)
        for cells in life.cells:
            known.require(cells, life.plan.identity.weight_version, block_id, block_hash)


def check_rest(service: CoordinatorService | None, lives: Mapping[InstanceId, Member]) -> None:
    """Nothing is held once everything has ended.

    Raises:
        InvariantError: naming what is, or there is no coordinator.
    """
    if service is None:
        raise InvariantError("the coordinator has not started")
    state = service.state
    held: Sequence[object] = [
        *(lease.lease_id for lease in state.leases.live()),
        *state.handoffs,
        *(
            f"{instance_id}: {member.manager.pool.num_used_blocks} blocks, "
            f"{sorted(member.requests)} {sorted(member.loads)} {sorted(member.followers)}"
            for instance_id, member in state.instances.items()
            if member.manager.pool.num_used_blocks or member.requests or member.followers
        ),
        *(f"{name} is not a member" for name in lives if name not in state.instances),
    ]
    if held:
        raise InvariantError("something is held though everything has ended", given=held)
