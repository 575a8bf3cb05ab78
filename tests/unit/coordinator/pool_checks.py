"""What holds for every cache manager at any time."""

from collections import Counter

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_manager import BlockCopy, CacheManager
from kvferry.coordinator.managers.full import SinkManager
from kvferry.proto.ids import NULL_BLOCK, BlockId


def check_pool(pool: BlockPool) -> None:
    """Check counts, the free queue and the index."""
    blocks = [BlockId(block) for block in range(1, pool.num_blocks)]
    order = list(pool.free_order())
    assert all(pool.ref_count(block) >= 0 for block in blocks)
    assert pool.ref_count(NULL_BLOCK) == 0
    assert len(order) == len(set(order)) == pool.num_free_blocks
    assert set(order) == {block for block in blocks if pool.ref_count(block) == 0}
    assert pool.num_free_blocks + pool.num_used_blocks + 1 == pool.num_blocks
    assert 0.0 <= pool.usage <= 1.0
    assert pool.num_refused_frees == 0
    indexed = Counter((key, block) for key, held in pool.index_items() for block in held)
    carried = Counter(
        (key, BlockId(block))
        for block in range(pool.num_blocks)
        for key in pool.keys_of(BlockId(block))
    )
    assert indexed == carried
    assert set(indexed.values()) <= {1}


def check_owners(manager: CacheManager, waiting_copies: list[BlockCopy]) -> None:
    """Check that every reference has an owner: a table, a copy to be made, or a sink."""
    owners: Counter[BlockId] = Counter(block for copy in waiting_copies for block in copy)
    for group in manager.groups:
        for _, table in group.tables():
            owners.update(block for block in table if block != NULL_BLOCK)
        if isinstance(group, SinkManager):
            owners.update(group.sink_blocks)
    pool = manager.pool
    references = {
        BlockId(block): pool.ref_count(BlockId(block))
        for block in range(1, pool.num_blocks)
        if pool.ref_count(BlockId(block))
    }
    assert references == dict(owners)
