"""Where requests' tokens came from: every token once, and preempted requests apart."""

from dataclasses import fields, replace

import pytest
from tests.unit.coordinator.fleet import Fleet, admit, failed, loaded, release, runs, wrote

from kvferry.proto.errors import ConfigError
from kvferry.proto.instance_stats import InstanceStats, TokenCounts


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.register("a")
    made.register("b")
    return made


def test_requested_tokens_are_those_found_here_those_from_peers_and_those_computed(
    fleet: Fleet,
) -> None:
    fleet.cache("a", "xyz")
    fleet.cache("b", "x")
    before = fleet.stats("b").first
    assert before == TokenCounts(requests=1, requested=5, computed=5)
    fleet.admit_load("b", admit("r", "xyzw", extra_tokens=3))
    assert fleet.stats("b").first.pending == 15
    fleet.step("b", load_results=(loaded("r", 12),), running=(runs("r", 19),))
    fleet.step("b", progress=(wrote("r", 19, 19),), releases=(release("r"),))
    after = fleet.stats("b").first
    assert after == TokenCounts(requests=2, requested=24, local_hit=4, remote_hit=8, computed=12)
    assert (after.pending, after.hit_rate) == (0, 0.5)
    assert fleet.stats("b").preempted == TokenCounts()
    assert fleet.stats("b").residency is None


def since(before: TokenCounts, after: TokenCounts) -> TokenCounts:
    """What was counted after `before`."""
    names = [field.name for field in fields(TokenCounts)]
    return TokenCounts(**{name: getattr(after, name) - getattr(before, name) for name in names})


def test_b46_an_admission_that_did_not_fit_counts_once_and_a_resumed_one_apart() -> None:
    fleet = Fleet()
    fleet.register("w", num_blocks=8)
    fleet.compute("w", admit("seed", "xy", extra_tokens=0))
    fleet.step("w", releases=(release("seed"),))
    fleet.compute("w", admit("hog", "HIJK"))
    start = fleet.stats("w").first
    r0 = admit("r0", "xyzw", extra_tokens=0)
    for _ in range(3):
        assert fleet.step("w", waiting=(r0,)).scheduled == ()
    assert fleet.stats("w").first == start
    fleet.step("w", releases=(release("hog"),), waiting=(r0,))
    fleet.step("w", progress=(wrote("r0", 16, 16),), waiting=(admit("r1", "pq", 0),))
    # r1 comes first in the engine's order, so r0 gives way when r1 cannot grow.
    reply = fleet.step("w", progress=(wrote("r1", 8, 8),), running=(runs("r1", 13), runs("r0", 16)))
    assert reply.preempted == ("r0",)
    fleet.step("w", releases=(release("r1"),), waiting=(replace(r0, resumed=True),))
    fleet.step("w", progress=(wrote("r0", 16, 16),))
    stats = fleet.stats("w")
    counted = since(start, stats.first)
    assert counted == TokenCounts(requests=2, requested=24, local_hit=8, computed=16)
    assert counted.hit_rate == pytest.approx(1 / 3)
    assert stats.preempted == TokenCounts(requests=1, requested=16, local_hit=12, computed=4)


def test_what_a_preempted_request_never_got_is_abandoned_and_asked_for_again() -> None:
    fleet = Fleet()
    fleet.register("w", num_blocks=6)
    fleet.step("w", 12, waiting=(admit("r", "x", 3), admit("s", "pq", 2)))
    reply = fleet.step(
        "w", progress=(wrote("r", 7, 7), wrote("s", 5, 10)), running=(runs("r", 13), runs("s", 10))
    )
    assert reply.preempted == ("s",)
    stats = fleet.stats("w")
    assert stats.first == TokenCounts(requests=2, requested=17, computed=12, abandoned=5)
    fleet.step("w", releases=(release("r"),), waiting=(admit("s", "pq", 2, resumed=True),))
    fleet.step("w", progress=(wrote("s", 10, 10),), releases=(release("s"),))
    stats = fleet.stats("w")
    assert stats.first == TokenCounts(requests=2, requested=17, computed=12, abandoned=5)
    assert stats.preempted == TokenCounts(requests=1, requested=10, local_hit=4, computed=6)


def test_only_what_an_admission_asked_for_counts(fleet: Fleet) -> None:
    # A prefill stops before the prompt's end; a decode goes on beyond it.
    fleet.compute("a", admit("p", "xy", 2, target_tokens=8))
    assert fleet.stats("a").first == TokenCounts(requests=1, requested=8, computed=8)
    fleet.compute("b", admit("d", "p", 2))
    fleet.step("b", progress=(wrote("d", 7, 7),), running=(runs("d", 7),))
    assert fleet.stats("b").first == TokenCounts(requests=1, requested=6, computed=6)


def test_a_short_load_counts_what_came_and_a_cancelled_one_nothing(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.admit_load("b", admit("r", "xyz"))
    fleet.step("b", load_results=(loaded("r", 4, failed(1)),), running=(runs("r", 13),))
    fleet.step("b", progress=(wrote("r", 13, 13),), releases=(release("r"),))
    came = TokenCounts(requests=1, requested=13, remote_hit=4, computed=9)
    assert fleet.stats("b").first == came
    fleet.register("c")
    fleet.admit_load("c", admit("s", "xyz"))
    fleet.step("c", releases=(release("s"),))
    assert fleet.stats("c").first.pending == 13
    fleet.step("c", load_results=(loaded("s", 12),))
    assert fleet.stats("c").first == TokenCounts(requests=1, requested=13, abandoned=13)


def test_a_new_life_of_an_instance_begins_with_nothing_counted(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.register("a", incarnation=2)
    assert fleet.stats("a") == InstanceStats()


def test_sampled_blocks_tell_how_long_they_lived_in_the_time_of_the_commands() -> None:
    fleet = Fleet(sample_block_every=1)
    fleet.register("w", num_blocks=4)
    fleet.cache("w", "xy")  # and a third block, of no use to others
    fleet.now = 1.5
    fleet.step("w", waiting=(admit("r", "xy", 0),))  # shares x, overwrites the third block
    fleet.step("w", progress=(wrote("r", 8, 8),), releases=(release("r"),))
    fleet.now = 4.0
    fleet.cache("w", "pq")
    residency = fleet.stats("w").residency
    assert residency is not None
    assert (sum(residency.lifetime.counts), residency.lifetime.sum_s) == (4, 1.5 + 4.0 + 4.0 + 2.5)
    assert (sum(residency.idle.counts), residency.idle.sum_s) == (4, 1.5 + 2.5 + 4.0 + 2.5)
    assert sum(residency.reuse_gap.counts) == 0


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_sample_of_no_blocks_is_refused(every: object) -> None:
    with pytest.raises(ConfigError, match=f"given: {every}; allowed: >= 1"):
        Fleet(sample_block_every=every)
