"""Slots for requests: the worked example, hits, external tokens, refusals."""

import pytest
from tests.unit.coordinator.caches import full_cache
from tests.unit.coordinator.fleet import chain

from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError, InvariantError
from kvferry.proto.ids import BlockId, RequestId


def request(name: str, text: str, num_tokens: int) -> RequestState:
    return RequestState(request_id=RequestId(name), num_tokens=num_tokens, hashes=list(chain(text)))


def admit(manager: CacheManager, asked: RequestState) -> list[int]:
    """Allocate all tokens of a request at once and return its table."""
    blocks, hits = manager.get_computed_blocks(asked)
    new = manager.allocate_slots(
        asked,
        asked.num_tokens - hits,
        num_new_computed_tokens=hits,
        new_computed_blocks=blocks,
    )
    assert new is not None
    manager.record_admission(asked, hits)
    asked.num_computed_tokens = asked.num_tokens
    return list(manager.block_table(asked.request_id)[0])


def test_the_worked_example_gives_the_recorded_tables_and_queues() -> None:
    manager = full_cache(11, 4, 8192)
    pool = manager.pool
    r0 = request("r0", "abc", 15)
    assert admit(manager, r0) == [1, 2, 3, 4]
    assert pool.num_keys == 3
    assert pool.usage == pytest.approx(0.4)
    r0.num_tokens, r0.hashes = 19, list(chain("abcd"))
    assert manager.allocate_slots(r0, 4) == ([5],)
    assert admit(manager, request("r1", "abX", 14)) == [1, 2, 6, 7]
    assert list(pool.free_order()) == [8, 9, 10]
    manager.free(r0.request_id)
    # vLLM 0.32: the partly filled block 5 has no hash and is reused first.
    assert list(pool.free_order()) == [5, 8, 9, 10, 4, 3]
    manager.free(RequestId("r1"))
    assert list(pool.free_order()) == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]
    assert admit(manager, request("r2", "abcDEFG", 29)) == [1, 2, 3, 7, 5, 8, 9, 10]
    assert list(pool.free_order()) == [4, 6]
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (3, 58, 20)
    assert not manager.reset_prefix_cache()
    manager.free(RequestId("r2"))
    assert manager.reset_prefix_cache()
    assert manager.take_stats().reset


def test_two_equal_prompts_keep_two_copies() -> None:
    manager = full_cache(11, 4, 100)
    assert admit(manager, request("r0", "xy", 8)) == [1, 2]
    # One hit only, because the last token must be computed: the second block is a copy.
    assert admit(manager, request("r1", "xy", 8)) == [1, 3]
    assert manager.pool.num_keys == 2
    assert dict(manager.pool.index_items()).popitem()[1] == (2, 3)


def test_external_tokens_get_blocks_after_the_hits_and_are_not_findable_yet() -> None:
    manager = full_cache(11, 4, 100)
    admit(manager, request("r0", "x", 5))
    manager.free(RequestId("r0"))
    asked = request("r1", "xyz", 13)
    blocks, hits = manager.get_computed_blocks(asked)
    assert (blocks, hits) == (([1],), 4)
    new = manager.allocate_slots(
        asked,
        0,
        num_new_computed_tokens=hits,
        new_computed_blocks=blocks,
        num_external_computed_tokens=8,
        delay_cache_blocks=True,
    )
    assert new == ([],)
    assert manager.block_table(asked.request_id) == ([1, 2, 3],)
    assert manager.pool.num_keys == 1
    asked.num_computed_tokens = 12
    manager.cache_blocks(asked, 8)
    assert manager.pool.num_keys == 2
    assert manager.allocate_slots(asked, 1) == ([4],)


def test_lookahead_slots_stop_at_the_models_limit() -> None:
    manager = full_cache(11, 4, 8)
    asked = request("r", "x", 7)
    assert manager.allocate_slots(asked, 7, num_lookahead_tokens=50) == ([1, 2],)


def test_asking_for_nothing_is_refused() -> None:
    manager = full_cache(11, 4, 100)
    with pytest.raises(BadInputError, match="num_new_tokens"):
        manager.allocate_slots(request("r", "x", 5), 0)


def test_a_running_request_takes_no_hits() -> None:
    manager = full_cache(11, 4, 100)
    asked = request("r", "x", 5)
    admit(manager, asked)
    with pytest.raises(InvariantError, match="running"):
        manager.allocate_slots(asked, 1, new_computed_blocks=([BlockId(1)],))


def test_a_request_that_skips_the_cache_has_no_hits_and_no_statistics() -> None:
    manager = full_cache(11, 4, 100)
    admit(manager, request("r0", "x", 5))
    asked = request("r1", "x", 5)
    asked.skip_reading_prefix_cache = True
    assert admit(manager, asked) == [3, 4]
    assert manager.take_stats().requests == 1


def test_without_caching_nothing_is_found() -> None:
    manager = full_cache(11, 4, 100, enable_caching=False)
    admit(manager, request("r0", "x", 5))
    assert manager.get_computed_blocks(request("r1", "x", 5)) == (((),), 0)
    manager.free(RequestId("r0"))
    assert list(manager.pool.free_order())[:2] == [2, 1]


def test_freeing_an_unknown_request_changes_nothing() -> None:
    manager = full_cache(4, 4, 100)
    manager.free(RequestId("nobody"))
    assert manager.pool.num_free_blocks == 3
