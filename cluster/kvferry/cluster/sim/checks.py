"""What must hold after every step, beside what the coordinator checks of itself."""

from collections.abc import Mapping, Sequence
from random import Random

from kvferry.cluster.sim.content import KnownContent
from kvferry.cluster.sim.members import Member
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import InstanceId, unpack_group


def check_residency(
    service: CoordinatorService, life: Member, known: KnownContent, random: Random
) -> None:
    """Findable means written: what the coordinator finds at a member, its worker holds.

    Of one block of an instance that computes the bytes are looked at, too.

    Raises:
        InvariantError: naming the block.
    """
    member = service.state.instances.get(life.plan.instance_id)
    if member is None or member.info.incarnation != life.incarnation:
        return
    found = list(member.manager.pool.index_items())
    residency = life.worker.residency
    for key, block_ids in found:
        for block_id in block_ids:
            if residency.key_of(block_id) != key:
                raise InvariantError(
                    f"{life.plan.instance_id}: block {block_id} is findable and not resident",
                    given=residency.key_of(block_id),
                    allowed=key,
                )
    if found and life.plan.role != "store":
        key, block_ids = random.choice(found)
        block_hash, _ = unpack_group(key)
        known.require(life.layers, random.choice(block_ids), block_hash)


def check_rest(service: CoordinatorService, lives: Mapping[InstanceId, Member]) -> None:
    """Nothing is held once everything has ended.

    Raises:
        InvariantError: naming what is.
    """
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
