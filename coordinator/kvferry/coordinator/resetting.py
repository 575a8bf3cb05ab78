"""Resets: what the stores of an identity hold, or are being given now, is never found again."""

from kvferry.coordinator.state import ServiceState
from kvferry.proto.messages import Forgotten, ResetIdentity


def reset_identity(state: ServiceState, command: ResetIdentity) -> Forgotten:
    """Make everything unfindable that the identity's stores hold, and end the leases on it.

    Reservations that are open now make nothing findable when they end. Blocks come back when their
    last user lets go.
    """
    stores = {
        instance_id: instance
        for instance_id, instance in state.instances.items()
        if instance.identity_digest == command.identity_digest and instance.info.role == "store"
    }
    for lease in state.leases.live():
        if lease.instance_id in stores:
            state.end_lease(lease.lease_id)
    num_blocks = 0
    state.resets[command.identity_digest] += 1
    for store in stores.values():
        num_blocks += store.manager.forget_all()
        store.num_resets = state.resets[command.identity_digest]
    state.counters["resets"] += 1
    state.note(
        "identity_reset",
        f"{command.identity_digest.hex()}: {num_blocks} blocks in {len(stores)} stores",
    )
    return Forgotten(num_blocks=num_blocks)
