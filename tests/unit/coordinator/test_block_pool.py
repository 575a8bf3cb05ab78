"""Ref counts, index and events of one pool."""

import pytest
from tests.unit.coordinator.fleet import chain

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.pool_events import Cleared, Removed, Stored
from kvferry.proto.errors import BadInputError, ConfigError, InvariantError
from kvferry.proto.ids import BlockId, GroupId, pack_group

G0, G1 = GroupId(0), GroupId(1)
H = chain("xyz")
K = [pack_group(block_hash, G0) for block_hash in H]


def cached_pool() -> BlockPool:
    """Blocks 1, 2, 3 hold x, y, z and are owned; 4 and 5 are free."""
    pool = BlockPool(6)
    pool.cache_full_blocks(H, pool.get_new_blocks(3), 0, 3, G0)
    pool.take_events()
    return pool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert list(pool.free_order()) == [1, 2, 3]
    assert pool.get_new_blocks(3) == [1, 2, 3]
    with pytest.raises(InvariantError, match="given: 1; allowed: 0"):
        pool.get_new_blocks(1)


@pytest.mark.parametrize("bad", [0, -1, 3.5, "x", True])
def test_a_pool_size_that_is_not_a_positive_integer_is_refused(bad: int) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(bad)


def test_usage_is_the_referenced_share_of_the_usable_blocks() -> None:
    pool = BlockPool(11)
    pool.get_new_blocks(4)
    assert pool.usage == pytest.approx(0.4)
    assert BlockPool(1).usage == 0.0


def test_a_prefix_is_found_up_to_the_first_gap_and_by_group() -> None:
    pool = cached_pool()
    assert pool.get_cached_prefix(H, G0) == [1, 2, 3]
    assert pool.get_cached_prefix(H, G1) == []
    pool.evict_blocks([BlockId(2)])
    assert pool.get_cached_prefix(H, G0) == [1]
    assert pool.get_cached_block(H[2], G0) == 3


def test_caching_tells_a_run_and_eviction_tells_each_block() -> None:
    pool = BlockPool(4)
    pool.cache_full_blocks(H, pool.get_new_blocks(3), 1, 3, G0)
    assert pool.take_events() == [Stored((BlockId(2), BlockId(3)), H[1:], G0, parent=H[0])]
    pool.free_blocks([BlockId(3), BlockId(2), BlockId(1)])
    # The unhashed block 1 is reused first, then the tail of the chain.
    assert list(pool.free_order()) == [1, 3, 2]
    assert pool.get_new_blocks(2) == [1, 3]
    assert pool.take_events() == [Removed((BlockId(3),), H[2:], G0)]
    assert pool.take_events() == []


def test_eviction_tells_a_run_per_group_in_the_order_of_the_blocks() -> None:
    pool = BlockPool(7)
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(H, blocks[:3], 0, 3, G1)
    pool.cache_full_blocks(H, blocks[3:], 0, 3, G0)
    assert [pool.key_of(block) for block in blocks[2:4]] == [pack_group(H[2], G1), K[0]]
    pool.free_blocks(blocks)
    pool.take_events()
    assert pool.get_new_blocks(4) == [1, 2, 3, 4]
    assert pool.take_events() == [
        Removed((BlockId(1), BlockId(2), BlockId(3)), H, G1),
        Removed((BlockId(4),), H[:1], G0),
    ]
    pool.cache_full_blocks(H, blocks[:1], 0, 1, G0)
    assert pool.get_cached_in_groups(H[0], [G0, G1]) is None
    assert (pool.get_cached_block(H[0], G0), pool.get_cached_block(H[1], G0)) == (1, 5)


def test_a_free_block_that_holds_nothing_cannot_be_touched() -> None:
    pool = BlockPool(3)
    with pytest.raises(InvariantError, match="free and holds nothing; given: 2"):
        pool.touch([BlockId(2)])
    assert list(pool.free_order()) == [1, 2]


def test_touching_takes_a_block_out_of_the_free_queue_once() -> None:
    pool = cached_pool()
    pool.free_blocks([BlockId(2)])
    assert list(pool.free_order()) == [4, 5, 2]
    pool.touch([BlockId(2), BlockId(2), BlockId(0)])
    assert list(pool.free_order()) == [4, 5]
    assert (pool.ref_count(BlockId(2)), pool.ref_count(BlockId(0))) == (2, 0)
    pool.free_blocks([BlockId(2)])
    assert list(pool.free_order()) == [4, 5]


def test_blocks_cannot_be_cached_twice_or_without_hashes() -> None:
    pool = cached_pool()
    blocks = [BlockId(1), BlockId(2), BlockId(3)]
    with pytest.raises(InvariantError, match="another hash; given: 1"):
        pool.cache_full_blocks(H, blocks, 0, 1, G0)
    with pytest.raises(InvariantError, match="fewer hashes"):
        pool.cache_full_blocks(H, blocks, 3, 4, G0)
    assert pool.take_events() == []


def test_an_unknown_block_stops_an_eviction_where_it_stands() -> None:
    pool = cached_pool()
    with pytest.raises(BadInputError, match="block_id=9; allowed: 0 to 5"):
        pool.evict_blocks([BlockId(2), BlockId(9), BlockId(3)])
    assert [pool.key_of(BlockId(block)) for block in (1, 2, 3)] == [K[0], None, K[2]]
    assert pool.ref_count(BlockId(2)) == 1


def test_forgetting_all_hashes_leaves_blocks_with_their_owners_and_in_their_order() -> None:
    pool = cached_pool()
    pool.touch([BlockId(2)])
    pool.free_blocks([BlockId(3), BlockId(2), BlockId(1)])
    order = list(pool.free_order())
    pool.forget_all()
    assert (pool.num_keys, pool.take_events()) == (0, [Cleared()])
    assert (pool.ref_count(BlockId(2)), list(pool.free_order())) == (1, order)
    pool.free_blocks([BlockId(2)])
    assert pool.num_free_blocks == 5
    pool.get_new_blocks(5)
    assert pool.take_events() == []
