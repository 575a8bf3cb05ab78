"""Who holds a prefix, and leases on it: the commands of clients and routers."""

from kvferry.coordinator.leases import Lease, require_ttl
from kvferry.coordinator.state import ServiceState
from kvferry.proto.errors import IdentityMismatchError
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import (
    AcquireLease,
    Done,
    Holder,
    Leased,
    Locate,
    Located,
    ReleaseLease,
    RenewLease,
)


def locate(state: ServiceState, command: Locate) -> Located:
    """Return the instances of the identity with what each can serve of the prefix."""
    holders = tuple(
        Holder(
            source=instance.source,
            role=instance.info.role,
            num_hashes=num_hashes,
            num_requests=instance.num_requests,
            num_free_blocks=instance.manager.pool.num_free_blocks,
        )
        for instance, num_hashes in state.holders(command.identity_digest, command.hashes)
    )
    avoid = sorted(
        instance_id
        for instance_id, instance in state.instances.items()
        if (instance.is_suspect or instance.draining)
        and instance.identity_digest == command.identity_digest
    )
    return Located(epoch=state.epoch, holders=holders, avoid=tuple(avoid))


def lease_command(
    state: ServiceState, command: AcquireLease | RenewLease | ReleaseLease, now: float
) -> Leased | Done:
    """Make, move or end a lease at `now`, in seconds.

    Raises:
        BadInputError: a duration that is not a positive number of seconds.
        IdentityMismatchError: the instance that is asked for holds blocks of another identity.
        NotFoundError: no such instance; or no such lease, or it has ended.

    """
    match command:
        case AcquireLease():
            return _acquire(state, command, now)
        case RenewLease():
            lease = state.leases.renew(command.lease_id, now=now, ttl_s=command.ttl_s)
            return _leased(state, lease, now)
        case ReleaseLease():
            return Done(changed=state.end_lease(command.lease_id))


def _acquire(state: ServiceState, command: AcquireLease, now: float) -> Leased:
    require_ttl("ttl_s", command.ttl_s)
    if command.instance_id is not None:
        _require_identity(state, command.instance_id, command.identity_digest)
    for instance, num_hashes in state.holders(command.identity_digest, command.hashes):
        if num_hashes and command.instance_id in (None, instance.info.instance_id):
            blocks = state.blocks_of_prefix(
                instance, command.hashes, instance.rules_of_hashes, end=num_hashes
            )
            lease = state.lease_blocks(
                instance, blocks, num_prefix_hashes=num_hashes, now=now, ttl_s=command.ttl_s
            )
            return _leased(state, lease, now)
    return Leased(lease_id=None, source=None, num_hashes=0, ttl_s=0.0)


def _require_identity(state: ServiceState, instance_id: InstanceId, identity_digest: bytes) -> None:
    instance = state.instance(instance_id)
    if instance.identity_digest != identity_digest:
        raise IdentityMismatchError(
            f"{instance_id} holds blocks of another identity",
            given={"digest": identity_digest.hex()},
            allowed={"digest": instance.identity_digest.hex()},
        )


def _leased(state: ServiceState, lease: Lease, now: float) -> Leased:
    return Leased(
        lease_id=lease.lease_id,
        source=state.instance(lease.instance_id).source,
        num_hashes=lease.num_prefix_hashes,
        ttl_s=lease.deadline_s - now,
    )
