"""Which blocks are sampled, and what their lives give."""

from bisect import bisect_left

from tests.unit.coordinator.caches import full_cache

from kvferry.coordinator.block_sampling import BlockSampler, Moment
from kvferry.proto.ids import BlockHash, BlockId, GroupId
from kvferry.proto.instance_stats import BUCKETS_S, Histogram, Residency


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def histogram(*durations_s: float) -> Histogram:
    counts = [0] * (len(BUCKETS_S) + 1)
    for duration_s in durations_s:
        counts[bisect_left(BUCKETS_S, duration_s)] += 1
    return Histogram(upper_ends_s=BUCKETS_S, counts=tuple(counts), sum_s=sum(durations_s))


def residency(lifetimes: list[float], idles: list[float], gaps: list[float]) -> Residency:
    return Residency(
        lifetime=histogram(*lifetimes), idle=histogram(*idles), reuse_gap=histogram(*gaps)
    )


def test_every_nth_block_handed_out_is_sampled_however_they_are_asked_for() -> None:
    for sizes in ([7], [1] * 7, [2, 3, 2], [0, 4, 0, 3]):
        moment = Moment()
        sampler = BlockSampler(3, moment)
        blocks = iter(ids(1, 2, 3, 4, 5, 6, 7))
        for size in sizes:
            sampler.handed_out([next(blocks) for _ in range(size)])
        moment.now_s = 1.0
        counts = []
        for block in ids(1, 2, 3, 4, 5, 6, 7):
            sampler.evicted((block,))
            counts.append(sum(sampler.read().lifetime.counts))
        assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_a_life_ends_with_its_length_its_idle_time_and_the_gaps_of_its_last_uses() -> None:
    moment = Moment()
    sampler = BlockSampler(1, moment)
    sampler.handed_out(ids(5))
    for now_s in (1.0, 2.0, 4.0, 8.0, 16.0):
        moment.now_s = now_s
        sampler.used(ids(5, 6))
    moment.now_s = 48.0
    sampler.handed_out(ids(5))
    # Four uses are remembered, at 2, 4, 8 and 16 s.
    assert sampler.read() == residency([48.0], [32.0], [2.0, 4.0, 8.0])
    moment.now_s = 48.0005
    sampler.evicted(ids(5))
    # A block that nobody came back to has been idle since it was handed out.
    assert sampler.read().idle.counts[0] == 1
    assert sampler.read().reuse_gap == histogram(2.0, 4.0, 8.0)


def test_a_duration_belongs_to_the_bucket_that_ends_with_it() -> None:
    moment = Moment()
    sampler = BlockSampler(1, moment)
    for duration_s in (0.0, 1.0, 1800.0, 1801.0):
        sampler.handed_out(ids(1))
        moment.now_s += duration_s
        sampler.evicted(ids(1))
    counts = sampler.read().lifetime.counts
    assert {end: n for end, n in zip((*BUCKETS_S, "beyond"), counts, strict=True) if n} == {
        0.001: 1,
        1.0: 1,
        1800.0: 1,
        "beyond": 1,
    }
    assert sampler.read().lifetime.sum_s == 3602.0


def test_a_pool_tells_its_sampler_what_it_hands_out_shares_and_evicts() -> None:
    manager = full_cache(6, 4, 100)
    pool, moment = manager.pool, Moment()
    pool.sampler = BlockSampler(1, moment)
    blocks = pool.get_new_blocks(2)
    moment.now_s = 1.0
    pool.touch(blocks)
    moment.now_s = 3.0
    pool.touch(blocks[:1])
    pool.evict_blocks(blocks)  # they have no content yet
    assert pool.sampler.read() == residency([], [], [])
    pool.cache_full_blocks([BlockHash(b"x" * 32)], blocks, 0, 1, GroupId(0))
    moment.now_s = 7.0
    pool.evict_blocks(blocks)
    assert pool.sampler.read() == residency([7.0], [4.0], [2.0])
    for _ in range(2):
        pool.free_blocks(blocks)
    pool.free_blocks(blocks[:1])
    moment.now_s = 10.0
    pool.get_new_blocks(5)
    assert pool.sampler.read() == residency([7.0, 10.0], [4.0, 9.0], [2.0])


def test_blocks_of_a_pool_that_was_reset_do_not_count() -> None:
    manager = full_cache(6, 4, 100)
    pool, moment = manager.pool, Moment()
    pool.sampler = BlockSampler(1, moment)
    pool.free_blocks(pool.get_new_blocks(5))
    assert manager.reset_prefix_cache()
    moment.now_s = 5.0
    pool.get_new_blocks(5)
    assert pool.sampler.read() == residency([], [], [])
