"""All that a pool has, as the events that would have made it so."""

from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.pool_events import Cleared, PoolEvent, Stored
from kvferry.proto.ids import BlockHash, BlockId, GroupId, unpack_group


def snapshot_events(manager: CacheManager) -> list[PoolEvent]:
    """Return `Cleared`, and one `Stored` per group with every key once per copy.

    A pool does not know what its blocks hold nor what came before them: there are no tokens and
    parents.
    """
    found: dict[GroupId, tuple[list[BlockId], list[BlockHash]]] = {}
    for key, copies in manager.pool.index_items():
        block_hash, group_id = unpack_group(key)
        blocks, hashes = found.setdefault(group_id, ([], []))
        blocks += copies
        hashes += [block_hash] * len(copies)
    return [
        Cleared(),
        *(
            Stored(
                tuple(blocks),
                tuple(hashes),
                group_id,
                block_tokens=manager.groups[group_id].block_tokens,
                origin=manager.groups[group_id].origin,
            )
            for group_id, (blocks, hashes) in sorted(found.items())
        ),
    ]
