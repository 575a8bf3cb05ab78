"""What keeps an instance's blocks in place now: leases, reservations and loads in flight."""

from kvferry.coordinator.instances import Instance
from kvferry.coordinator.leases import LeaseTable
from kvferry.proto.ids import NULL_BLOCK, BlockId, RequestId
from kvferry.proto.instance_stats import Held


def held_of(instance: Instance, leases: LeaseTable) -> Held:
    """Return what is held of an instance; takes time with what is held, not with its pool."""
    leased = [
        lease.block_ids for lease in leases.live() if lease.instance_id == instance.info.instance_id
    ]
    reserved = [reservation.block_ids for reservation in instance.reservations.values()]
    loading = {request_id: _num_destinations(instance, request_id) for request_id in instance.loads}
    return Held(
        leases=len(leased),
        leased_blocks=len(set[BlockId]().union(*leased)),
        reservations=len(reserved),
        reserved_blocks=sum(block is not None for blocks in reserved for block in blocks),
        loads=len(loading),
        loading_blocks=sum(loading.values()),
        quarantined_blocks=sum(
            loading[request_id] for request_id, load in instance.loads.items() if load.cancelled
        ),
    )


def _num_destinations(instance: Instance, request_id: RequestId) -> int:
    """Count the blocks of a load that are being written: its table from what it hit to its end."""
    load, size = instance.loads[request_id], instance.block_tokens
    written = slice(load.hit_tokens // size, load.asked_tokens // size)
    tables = instance.tables(request_id)
    return sum(block != NULL_BLOCK for table in tables for block in table[written])
