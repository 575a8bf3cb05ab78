"""What instances have of the hash chain, block by block, and who can take blocks of whom."""

from collections.abc import Callable, Iterable

from kvferry.coordinator.instances import Instance
from kvferry.coordinator.state import ServiceState
from kvferry.proto.ids import BlockHash, GroupId


def takers_of(state: ServiceState, instance: Instance) -> list[Instance]:
    """Return the others of an identity whose blocks cover as many tokens, unless they go, too."""
    return [
        peer
        for peer in state.instances.values()
        if peer is not instance
        and peer.draining is None
        and peer.identity_digest == instance.identity_digest
        and peer.hashes_per_block == instance.hashes_per_block
    ]


def peers_of(state: ServiceState, instance: Instance) -> list[Instance]:
    """Return those of them that are live."""
    return [peer for peer in takers_of(state, instance) if peer.state == "live"]


def groups_that_hold(instance: Instance, block_hash: BlockHash) -> list[GroupId]:
    """Return the groups in which an instance has a block of a hash."""
    pool = instance.manager.pool
    groups = map(GroupId, range(len(instance.rules)))
    return [group for group in groups if pool.get_cached_block(block_hash, group) is not None]


def holds(instance: Instance, block_hash: BlockHash, groups: Iterable[GroupId]) -> bool:
    """Tell whether an instance has a block of a hash in all of the groups."""
    pool = instance.manager.pool
    return all(pool.get_cached_block(block_hash, group_id) is not None for group_id in groups)


def parent_of(instance: Instance, block_hash: BlockHash) -> BlockHash | None:
    """Return the hash before one of an instance, None where the chain begins or nobody knows it."""
    pool = instance.manager.pool
    for group_id in groups_that_hold(instance, block_hash):
        block = pool.get_cached_block(block_hash, group_id)
        if block is not None and (before := pool.parent_of(block)) is not None:
            return before
    return None


def path_to(
    source: Instance, block_hash: BlockHash, has: Callable[[BlockHash], bool], room: int
) -> list[BlockHash]:
    """Return the chain up to a block, in order, from behind what somebody `has` of it.

    No longer than there is room for and one more.
    """
    path: list[BlockHash] = []
    one: BlockHash | None = block_hash
    while one is not None and len(path) <= room and not has(one):
        path.append(one)
        one = parent_of(source, one)
    path.reverse()
    return path
