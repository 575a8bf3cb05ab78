"""All that a pool has, as the events that would have made it so."""

from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.pool_events import Cleared, PoolEvent, Stored
from kvferry.proto.ids import BlockId, GroupedHash, GroupId, unpack_group


def snapshot_events(manager: CacheManager) -> list[PoolEvent]:
    """Return `Cleared`, and one `Stored` per group with every key once per copy.

    A pool does not know what its blocks hold nor what came before them: there are no tokens and
    parents.
    """
    found: dict[GroupId, tuple[list[BlockId], list[GroupedHash]]] = {}
    for key, copies in manager.pool.index_items():
        blocks, keys = found.setdefault(unpack_group(key)[1], ([], []))
        blocks += copies
        keys += [key] * len(copies)
    return [
        Cleared(),
        *(
            Stored(
                tuple(blocks),
                tuple(keys),
                block_tokens=manager.groups[group_id].block_tokens,
                origin=manager.groups[group_id].origin,
            )
            for group_id, (blocks, keys) in sorted(found.items())
        ),
    ]
