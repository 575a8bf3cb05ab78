"""Known failures of such systems, each as a test of its own; the number names the case."""

import pytest
from tests.unit.coordinator.caches import full_cache
from tests.unit.coordinator.fleet import (
    Fleet,
    admit,
    chain,
    failed,
    loaded,
    new_blocks,
    num_granted,
    release,
    runs,
    wrote,
)

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    InvariantError,
    MismatchError,
    NeverFitsError,
)
from kvferry.proto.ids import BlockHash, BlockId, GroupId, InstanceId, RequestId

G0 = GroupId(0)


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def request(name: str, text: str, num_tokens: int) -> RequestState:
    return RequestState(request_id=RequestId(name), num_tokens=num_tokens, hashes=list(chain(text)))


def allocate(manager: CacheManager, asked: RequestState) -> list[int] | None:
    """Look up and allocate all tokens; record the admission. None: refused."""
    hit, hits = manager.get_computed_blocks(asked)
    granted = manager.allocate_slots(
        asked, asked.num_tokens - hits, num_new_computed_tokens=hits, new_computed_blocks=hit
    )
    if granted is None:
        return None
    manager.record_admission(asked, hits)
    return list(manager.block_table(asked.request_id)[0])


def test_b11a_blocks_that_are_not_written_yet_are_found_by_nobody() -> None:
    fleet = Fleet()
    fleet.register("w0")
    fleet.register("w1")
    fleet.admit("w0", admit("r0", "xy"))
    same_worker = fleet.admit("w0", admit("r1", "xy"))
    other_worker = fleet.admit("w1", admit("r1", "xy"))
    assert (same_worker.num_computed_tokens, other_worker.num_computed_tokens) == (0, 0)
    assert fleet.locate("xy") == {"w0": 0, "w1": 0}


def test_b11c_blocks_of_a_request_aborted_before_they_were_written_are_not_found() -> None:
    fleet = Fleet()
    fleet.register("w0")
    fleet.admit("w0", admit("r0", "xy"))
    fleet.step("w0", releases=(release("r0"),))
    assert fleet.admit("w0", admit("r2", "xy")).num_computed_tokens == 0


def test_b14a_a_worker_that_let_its_memory_go_comes_back_with_no_hits() -> None:
    # Whoever zeroes its tensors begins a new life: data and index end together.
    fleet = Fleet()
    fleet.register("w0")
    fleet.cache("w0", "xy", request="r0")
    assert fleet.locate("xy") == {"w0": 2}
    fleet.register("w0", incarnation=2)
    assert fleet.locate("xy") == {"w0": 0}
    assert fleet.admit("w0", admit("r1", "xy")).num_computed_tokens == 0


def test_b14b_a_reset_while_a_block_is_held_says_so_and_changes_nothing() -> None:
    manager = full_cache(8, 4, 100)
    allocate(manager, request("r0", "xy", 8))
    manager.free(RequestId("r0"))
    allocate(manager, request("r2", "p", 4))
    assert manager.reset_prefix_cache() is False
    assert manager.get_computed_blocks(request("r1", "xy", 9))[1] == 8
    manager.free(RequestId("r2"))
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(request("r1", "xy", 9))[1] == 0


def test_b14c_what_an_unreachable_worker_held_is_no_hit() -> None:
    fleet = Fleet()
    for name in ("w1", "w2"):
        fleet.register(name)
    fleet.cache("w2", "xy")
    assert fleet.remove("w2")
    assert fleet.locate("xy") == {"w1": 0}
    assert fleet.step("w1", waiting=(admit("r1", "xy"),)).loads == ()


def test_b15_freeing_twice_is_counted_and_corrupts_nothing() -> None:
    pool = BlockPool(6)
    assert pool.get_new_blocks(1) == [1]
    pool.free_blocks(blocks(1, 1))
    assert (pool.num_free_blocks, pool.num_refused_frees) == (5, 1)
    pool.free_blocks(blocks(1))
    pool.free_blocks(blocks(0))  # the null block stands in tables and is nobody's
    assert (pool.num_free_blocks, pool.num_refused_frees) == (5, 2)
    assert pool.ref_count(BlockId(1)) == 0
    assert sorted(pool.free_order()) == [1, 2, 3, 4, 5]
    assert sorted(pool.get_new_blocks(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(InvariantError):
        pool.get_new_blocks(1)


def test_b17_a_refused_allocation_changes_nothing_however_often_it_is_tried() -> None:
    manager = full_cache(6, 4, 100)
    pool = manager.pool
    assert allocate(manager, request("r0", "xyz", 12)) == [1, 2, 3]
    manager.free(RequestId("r0"))
    assert list(pool.free_order()) == [4, 5, 3, 2, 1]
    for _ in range(3):
        assert allocate(manager, request("r1", "xyABCD", 24)) is None
        assert list(pool.free_order()) == [4, 5, 3, 2, 1]
        assert (pool.ref_count(BlockId(1)), pool.ref_count(BlockId(2))) == (0, 0)
    assert pool.num_keys == 3


def test_b18_every_copy_of_a_prefix_is_kept_and_forgotten_on_its_own() -> None:
    pool = BlockPool(9)
    hashes = chain("xy")
    first, second = pool.get_new_blocks(3), pool.get_new_blocks(3)
    for table in (first, second):
        pool.cache_full_blocks(hashes, table, 0, 2, G0)
    for table in (first, second):
        pool.free_blocks(reversed(table))
    keys = [pool.key_of(block) for block in blocks(1, 2, 4, 5)]
    assert keys == [keys[0], keys[1], keys[0], keys[1]]
    assert keys[0] != keys[1]
    pool.touch(blocks(1))
    pool.evict_blocks(blocks(1))
    assert pool.key_of(BlockId(1)) is None
    assert pool.get_cached_prefix(hashes, G0) == [4, 2]
    pool.evict_blocks(blocks(4))
    assert pool.get_cached_prefix(hashes, G0) == []
    pool.cache_full_blocks(chain("n"), blocks(1), 0, 1, G0)
    assert pool.get_cached_prefix(hashes, G0) == []
    assert pool.get_cached_prefix(chain("n"), G0) == [1]


def test_b20_aborting_without_blocks_or_twice_is_no_error_and_is_counted() -> None:
    fleet = Fleet()
    fleet.register("w", num_blocks=6)
    fleet.step("w", releases=(release("r0"),))
    fleet.compute("w", admit("r1", "x"))
    fleet.step("w", releases=(release("r1"),))
    fleet.step("w", releases=(release("r1"), release("unknown")))
    assert fleet.num_free("w") == 5
    assert fleet.describe().counters["ignored_messages"] == 3


def test_b21_the_end_of_a_chain_is_evicted_first() -> None:
    for _ in range(200):
        manager = full_cache(4, 4, 100)
        allocate(manager, request("r0", "xyz", 12))
        manager.free(RequestId("r0"))
        assert allocate(manager, request("r1", "", 2)) == [3]
        manager.free(RequestId("r1"))
        assert manager.get_computed_blocks(request("r2", "xyz", 13)) == (([1, 2],), 8)


def test_b21_blocks_behind_a_hole_are_no_hit() -> None:
    manager = full_cache(5, 4, 100)
    allocate(manager, request("r0", "xyz", 12))
    manager.evict_blocks(blocks(1))
    assert manager.get_computed_blocks(request("r2", "xyz", 13)) == (([],), 0)


def aborted_with_a_receive_and_a_send_pending() -> Fleet:
    """Instance d pulls r from p, r is aborted; r's own blocks at d are leased for nobody else."""
    fleet = Fleet()
    fleet.register("p")
    fleet.register("d")
    fleet.open_handoff("r", "p", "d")
    fleet.compute("p", admit("r", "xy", target_tokens=8))
    fleet.step("p", releases=(release("r", handoff=True),))
    fleet.admit_load("d", admit("r", "xy"))
    fleet.step("d", releases=(release("r"),))
    assert (fleet.num_free("p"), fleet.num_free("d")) == (7, 7)
    return fleet


@pytest.mark.parametrize("order", ["receive first", "send first"])
@pytest.mark.parametrize("times", [1, 2])
def test_b39_late_completions_free_once_and_are_ignored_after_that(order: str, times: int) -> None:
    fleet = aborted_with_a_receive_and_a_send_pending()

    def receive_ended() -> None:
        fleet.step(
            "d",
            load_results=(
                loaded("r", 0, failed(0, "Cancelled")),
                loaded("never seen", 4),
            ),
        )

    def send_ended() -> None:
        fleet.close_handoff("r")

    endings = [receive_ended, send_ended]
    if order == "send first":
        endings.reverse()
    for end in endings:
        for _ in range(times):
            end()
    assert (fleet.num_free("p"), fleet.num_free("d")) == (9, 9)
    assert fleet.describe().counters["ignored_messages"] == 2 * times - 1
    fleet.step("d", progress=(wrote("r", 8, 9),))
    assert fleet.describe().counters["ignored_messages"] == 2 * times
    assert num_granted(fleet.admit("d", admit("s", "q"))) == 5


def test_b39_the_blocks_stay_while_the_other_transfer_still_runs() -> None:
    fleet = aborted_with_a_receive_and_a_send_pending()
    fleet.close_handoff("r")
    # The source's lease for the load itself, and the destination of the open writer.
    assert (fleet.num_free("p"), fleet.num_free("d")) == (7, 7)


def test_b44_a_worker_that_dies_and_returns_leaves_no_trace() -> None:
    fleet = Fleet()
    fleet.register("peer")

    def live_tables() -> tuple[int, int, int, int, int]:
        state = fleet.service.state
        return (
            len(state.instances),
            state.index.num_keys(),
            len(state.leases),
            len(state.handoffs),
            len(state.instances[InstanceId("w")].requests),
        )

    sizes = set()
    for life in range(1, 101):
        fleet.register("w", num_blocks=8, incarnation=life)
        fleet.cache("w", "xyzw", request=f"r{life}")
        fleet.lease("xyzw", at="w")
        fleet.open_handoff(f"h{life}", "w", "peer")
        sizes.add(live_tables())
    assert sizes == {(2, 4, 1, 1, 0)}
    fleet.register("w", num_blocks=8, incarnation=100)
    with pytest.raises(MismatchError, match="elsewhere"):
        fleet.register("w", num_blocks=8, incarnation=100, rank_addresses=("elsewhere",))
    assert fleet.locate("xyzw")["w"] == 4


def test_b46_hits_count_once_at_admission_and_apart_after_a_preemption() -> None:
    manager = full_cache(8, 4, 100)
    allocate(manager, request("seed", "xy", 8))
    manager.free(RequestId("seed"))
    hog = request("hog", "HIJK", 17)
    assert allocate(manager, hog) is not None
    manager.take_stats()
    r0 = request("r0", "xyzw", 16)
    for _ in range(3):
        assert allocate(manager, r0) is None
    manager.free(hog.request_id)
    assert allocate(manager, r0) is not None
    manager.free(r0.request_id)
    r0.num_preemptions += 1
    assert allocate(manager, r0) is not None
    assert allocate(manager, request("r1", "pq", 8)) is not None
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 24, 8)
    assert stats.hit_rate == pytest.approx(1 / 3)
    preempted = (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits)
    assert preempted == (1, 16, 12)


@pytest.mark.parametrize("num_blocks", [0, -1, 3.5, "x", 1])
def test_b50_a_pool_without_a_usable_block_is_refused_at_registration(num_blocks: int) -> None:
    fleet = Fleet()
    with pytest.raises(ConfigError, match="num_blocks"):
        fleet.register("w", num_blocks=num_blocks)


def test_b50_a_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    fleet = Fleet()
    fleet.register("w", num_blocks=4, max_model_len=16)
    never = admit("r0", "wxyz", extra_tokens=0)
    with pytest.raises(NeverFitsError, match="needed_blocks=4, have_blocks=3"):
        fleet.step("w", waiting=(never, admit("r1", "q", extra_tokens=0)))
    assert num_granted(fleet.admit("w", admit("r1", "q", extra_tokens=0))) == 4
    fleet.register("w5", num_blocks=5, max_model_len=16)
    assert num_granted(fleet.admit("w5", never)) == 16


def test_b50_growth_never_asks_for_more_than_the_models_limit() -> None:
    fleet = Fleet()
    fleet.register("w", num_blocks=5, max_model_len=16)
    fleet.compute("w", admit("r", "xyz", extra_tokens=3))
    with pytest.raises(BadInputError, match="given: 17; allowed: 1 to max_model_len = 16"):
        fleet.step("w", running=(runs("r", 17),))
    new_hash = BlockHash(b"n" * 32)
    reply = fleet.step("w", progress=(wrote("r", 15, 16, (new_hash,)),), running=(runs("r", 16),))
    assert [(num_granted(s), new_blocks(s)) for s in reply.scheduled] == [(1, ())]
