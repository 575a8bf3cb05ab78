"""One engine step over the whole service: reports, running requests, admissions."""

from typing import Any

import pytest
from tests.unit.coordinator.fleet import (
    HYBRID,
    Fleet,
    admit,
    chain,
    failed,
    load_blocks,
    loaded,
    new_blocks,
    num_granted,
    release,
    runs,
    wrote,
)

from kvferry.proto.errors import (
    BadInputError,
    NeverFitsError,
    NotFoundError,
    NotRegisteredError,
    PromptTooLongError,
    StaleError,
)
from kvferry.proto.ids import BlockId, Epoch, RequestId
from kvferry.proto.messages import Tick
from kvferry.proto.step_messages import Load, Scheduled, Step


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def test_a_first_admission_gets_its_whole_table_and_all_its_tokens(fleet: Fleet) -> None:
    assert fleet.admit("a", admit("r", "xy")) == Scheduled(
        request_id=RequestId("r"),
        num_computed_tokens=0,
        granted_tokens=9,
        new_block_ids=(ids(1, 2, 3),),
        num_hit_blocks=0,
    )


def test_blocks_become_findable_only_when_they_are_reported_written(fleet: Fleet) -> None:
    fleet.admit("a", admit("r", "xy"))
    assert fleet.locate("xy") == {"a": 0, "b": 0}
    fleet.step("a", progress=(wrote("r", 7, 9),))
    assert fleet.locate("xy") == {"a": 1, "b": 0}
    fleet.step("a", progress=(wrote("r", 9, 9),))
    assert fleet.locate("xy") == {"a": 2, "b": 0}


def test_a_cached_prefix_is_hit_and_shared(fleet: Fleet) -> None:
    fleet.compute("a", admit("r", "xy"))
    scheduled = fleet.admit("a", admit("s", "xyz"))
    assert new_blocks(scheduled) == (1, 2, 4, 5)
    assert (scheduled.num_computed_tokens, scheduled.num_hit_blocks) == (8, 2)
    assert num_granted(scheduled) == 5
    assert fleet.stats("a").first.local_hit == 8


def test_the_last_token_is_always_computed(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    scheduled = fleet.admit("a", admit("s", "xy", extra_tokens=0))
    assert (scheduled.num_computed_tokens, num_granted(scheduled)) == (4, 4)


def test_a_target_that_hits_cover_is_scheduled_with_nothing_to_compute(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    scheduled = fleet.admit("a", admit("s", "xyz", target_tokens=8))
    assert new_blocks(scheduled) == (1, 2)
    assert (scheduled.num_computed_tokens, num_granted(scheduled)) == (8, 0)


def test_the_token_budget_is_shared_running_requests_first(fleet: Fleet) -> None:
    fleet.compute("a", admit("r", "x"))
    reply = fleet.step("a", 6, running=(runs("r", 7),), waiting=(admit("s", "pq"), admit("t", "v")))
    granted = {s.request_id: num_granted(s) for s in reply.scheduled}
    assert granted == {"r": 2, "s": 4}
    again = fleet.step("a", 6, progress=(wrote("s", 4, 9),), running=(runs("s", 9),))
    assert again.scheduled == (
        Scheduled(
            request_id=RequestId("s"),
            num_computed_tokens=4,
            granted_tokens=9,
            new_block_ids=(ids(4, 5),),
        ),
    )


def test_growing_hands_out_only_the_added_blocks(fleet: Fleet) -> None:
    fleet.admit("a", admit("r", "x", extra_tokens=3))
    progress = wrote("r", 7, 8, chain("xy")[1:])
    (first,) = fleet.step("a", progress=(progress,), running=(runs("r", 8),)).scheduled
    assert (first.num_computed_tokens, num_granted(first), new_blocks(first)) == (7, 1, ())
    (second,) = fleet.step("a", progress=(wrote("r", 8, 9),), running=(runs("r", 9),)).scheduled
    assert new_blocks(second) == (3,)
    assert fleet.locate("xy")["a"] == 2


def test_a_longer_prefix_of_a_peer_becomes_a_load_beyond_the_local_hit(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.cache("b", "x")
    load = fleet.admit_load("b", admit("r", "xyz"))
    assert load == Load(
        request_id=RequestId("r"),
        block_ids=(ids(1, 2, 3),),
        num_hit_blocks=1,
        source=load.source,
        lease_id=load.lease_id,
        ttl_s=60.0,
    )
    assert load.source.instance_id == "a"
    # The source keeps blocks 2 and 3 (y, z); x is not asked for.
    assert fleet.num_free("a") == 7
    assert fleet.locate("xyz") == {"a": 3, "b": 1}


def test_a_whole_load_makes_blocks_findable_and_ends_the_lease(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.admit_load("b", admit("r", "xyz"))
    reply = fleet.step("b", load_results=(loaded("r", 12),), running=(runs("r", 13),))
    (scheduled,) = reply.scheduled
    assert (scheduled.num_computed_tokens, num_granted(scheduled)) == (12, 1)
    assert fleet.locate("xyz") == {"a": 3, "b": 3}
    assert fleet.num_free("a") == 9
    assert fleet.stats("b").first.remote_hit == 12


def test_a_short_load_counts_what_arrived_and_the_rest_is_computed(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    load = fleet.admit_load("b", admit("r", "xyz"))
    reply = fleet.step("b", load_results=(loaded("r", 4, failed(1)),), running=(runs("r", 13),))
    (scheduled,) = reply.scheduled
    assert (scheduled.num_computed_tokens, num_granted(scheduled)) == (4, 9)
    assert len(load_blocks(load)) == 3
    assert len(new_blocks(scheduled)) == 1
    assert fleet.locate("xyz")["b"] == 1
    assert fleet.describe().counters["failed_loads"] == 1


def test_among_equal_peers_the_least_loaded_serves_then_the_smallest_id(fleet: Fleet) -> None:
    fleet.register("c")
    fleet.register("d")
    fleet.cache("a", "x")
    fleet.cache("b", "x")
    assert fleet.admit_load("c", admit("r", "x")).source.instance_id == "a"
    fleet.compute("a", admit("busy", "q", allow_remote=False))
    assert fleet.admit_load("d", admit("s", "x")).source.instance_id == "b"


def test_no_peer_is_asked_when_the_request_forbids_it(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    reply = fleet.step("b", waiting=(admit("r", "xyz", allow_remote=False),))
    assert (len(reply.loads), len(reply.scheduled)) == (0, 1)


def test_a_load_needs_no_token_budget(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    reply = fleet.step("b", 0, waiting=(admit("r", "xyz"), admit("s", "q")))
    assert [load.request_id for load in reply.loads] == ["r"]
    assert reply.scheduled == ()


def test_admission_stops_at_the_first_request_that_does_not_fit(fleet: Fleet) -> None:
    fleet.compute("a", admit("r", "xyzw"))
    reply = fleet.step("a", waiting=(admit("s", "pqrst"), admit("t", "v")))
    assert (reply.scheduled, fleet.num_free("a")) == ((), 4)


def test_the_last_running_request_is_preempted_and_nobody_is_admitted_then(fleet: Fleet) -> None:
    fleet.compute("a", admit("r", "xyz", extra_tokens=0))
    fleet.compute("a", admit("s", "pqrst", extra_tokens=3))
    reply = fleet.step("a", running=(runs("r", 16), runs("s", 23)), waiting=(admit("t", "v"),))
    assert reply.preempted == ("s",)
    assert [s.request_id for s in reply.scheduled] == ["r"]
    assert fleet.describe().counters["preemptions"] == 1
    # r took the unhashed tail block of s; the five cached ones stay findable.
    assert fleet.locate("pqrst")["a"] == 5


def test_a_request_that_cannot_grow_alone_preempts_itself() -> None:
    fleet = Fleet()
    fleet.register("a", num_blocks=3)
    fleet.compute("a", admit("r", "xy", extra_tokens=0))
    reply = fleet.step("a", running=(runs("r", 9),))
    assert (reply.preempted, reply.scheduled, fleet.num_free("a")) == (("r",), (), 2)


def two_running_and_a_load(num_free: int = 0) -> Fleet:
    """Instance b: r and s hold 2 blocks each, load l holds 3, `num_free` are free."""
    fleet = Fleet()
    fleet.register("a")
    fleet.register("b", num_blocks=8 + num_free)
    fleet.cache("a", "xyz")
    fleet.compute("b", admit("r", "p", extra_tokens=3))
    fleet.compute("b", admit("s", "q", extra_tokens=3))
    fleet.admit_load("b", admit("l", "xyz"))
    return fleet


def test_a_load_is_cancelled_before_a_running_request_is_preempted() -> None:
    fleet = two_running_and_a_load()
    progress = (wrote("r", 7, 9, chain("pp")[1:]),)
    reply = fleet.step(
        "b", progress=progress, running=(runs("r", 9), runs("s", 7)), waiting=(admit("t", "v"),)
    )
    assert (reply.cancel_loads, reply.preempted) == (("l",), ())
    assert reply.scheduled == (
        Scheduled(
            request_id=RequestId("s"),
            num_computed_tokens=7,
            granted_tokens=7,
            new_block_ids=((),),
        ),
    )
    # The writer is still open: r waits, nobody is preempted, nobody is admitted.
    waiting = fleet.step("b", running=(runs("r", 9),), waiting=(admit("t", "v"),))
    assert (waiting.cancel_loads, waiting.preempted, waiting.scheduled) == ((), (), ())
    closed = fleet.step("b", load_results=(loaded("l", 4),), running=(runs("r", 9),))
    assert closed.preempted == ("l",)
    assert [s.request_id for s in closed.scheduled] == ["r"]
    assert fleet.num_free("b") == 2
    assert fleet.num_free("a") == 9
    assert fleet.describe().counters["cancelled_loads"] == 1


def test_a_request_released_while_loading_gives_its_blocks_back_with_the_load_result() -> None:
    fleet = two_running_and_a_load()
    assert fleet.step("b", releases=(release("l"),)).cancel_loads == ("l",)
    assert fleet.num_free("b") == 0
    reply = fleet.step("b", load_results=(loaded("l", 0, failed(0)),))
    assert (reply.preempted, fleet.num_free("b")) == ((), 3)


def test_a_request_released_when_its_cancelled_load_ends_is_not_queued_again() -> None:
    fleet = two_running_and_a_load()
    progress = (wrote("r", 7, 9, chain("pp")[1:]),)
    fleet.step("b", progress=progress, running=(runs("r", 9),))
    reply = fleet.step("b", load_results=(loaded("l", 0),), releases=(release("l"),))
    assert (reply.preempted, fleet.num_free("b")) == ((), 3)
    assert fleet.describe().counters["ignored_messages"] == 0


def test_a_load_whose_source_lease_expired_may_still_succeed(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.admit_load("b", admit("r", "xyz"))
    fleet.now = 60.0
    fleet.send(Tick())
    assert fleet.num_free("a") == 9
    assert [effect.kind for effect in fleet.effects][-1] == "lease_expired"
    fleet.step("b", load_results=(loaded("r", 12),))
    assert fleet.locate("xyz")["b"] == 3


def test_a_repeated_step_gets_the_same_reply_and_allocates_once(fleet: Fleet) -> None:
    step = fleet.make_step("a", waiting=(admit("r", "xy"),))
    assert fleet.send(step) == fleet.send(step)
    assert fleet.num_free("a") == 6


def test_a_step_of_another_life_is_refused(fleet: Fleet) -> None:
    step = fleet.make_step("a")
    stale = Step(
        call_id="e",
        epoch=Epoch(0),
        instance_id=step.instance_id,
        incarnation=step.incarnation,
        token_budget=1,
    )
    with pytest.raises(StaleError, match="given: 0; allowed: 1"):
        fleet.send(stale)
    fleet.register("a", incarnation=2)
    with pytest.raises(StaleError, match="given: 1; allowed: 2"):
        fleet.send(step)


def test_a_step_of_an_unknown_instance_is_refused(fleet: Fleet) -> None:
    with pytest.raises(NotRegisteredError, match="given: zz"):
        fleet.step("zz")


def test_contradicting_steps_are_refused_and_change_nothing(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.compute("b", admit("r", "p"))
    fleet.admit_load("b", admit("l", "xyz"))
    free = fleet.num_free("b")
    ok = admit("t", "v")
    bad_parts: list[tuple[type[Exception], dict[str, Any]]] = [
        (NotFoundError, {"running": (runs("nobody", 5),)}),
        (BadInputError, {"running": (runs("l", 13),)}),
        (BadInputError, {"running": (runs("r", 5), runs("r", 5))}),
        (BadInputError, {"waiting": (admit("r", "p"),)}),
        (BadInputError, {"waiting": (admit("u", "v", hashes=()),)}),
        (BadInputError, {"waiting": (admit("u", "v", target_tokens=6),)}),
        (PromptTooLongError, {"running": (runs("r", 1001),)}),
        (NeverFitsError, {"waiting": (ok, admit("u", "0123456789"))}),
        (BadInputError, {"load_results": (loaded("l", 16),)}),
        (BadInputError, {"load_results": (loaded("l", 5),)}),
        (BadInputError, {"progress": (wrote("r", 9, 9),)}),
        (BadInputError, {"progress": (wrote("r", 4, 5),)}),
        (BadInputError, {"progress": (wrote("r", 5, 8),)}),
        (BadInputError, {"progress": (wrote("l", 13, 13),)}),
    ]
    for error, parts in bad_parts:
        with pytest.raises(error):
            fleet.step("b", **{"waiting": (ok,), **parts})
    with pytest.raises(BadInputError, match="token_budget"):
        fleet.step("b", -1)
    assert fleet.num_free("b") == free


def test_nobody_is_admitted_while_a_running_request_waits_for_a_cancelled_load() -> None:
    fleet = two_running_and_a_load(num_free=1)
    assert fleet.step("b", running=(runs("r", 13),)).cancel_loads == ("l",)
    reply = fleet.step("b", running=(runs("r", 13),), waiting=(admit("t", ""),))
    assert (reply.scheduled, reply.preempted, fleet.num_free("b")) == ((), (), 1)
    closed = fleet.step("b", load_results=(loaded("l", 0),), running=(runs("r", 13),))
    assert [len(new_blocks(s)) for s in closed.scheduled] == [2]


def test_as_many_loads_are_cancelled_as_running_requests_need_newest_first() -> None:
    fleet = Fleet()
    fleet.register("a")
    fleet.register("b", num_blocks=8)
    for text in "uvw":
        fleet.cache("a", text, request=f"seed-{text}")
    fleet.compute("b", admit("r", "p", extra_tokens=3))
    fleet.compute("b", admit("s", "q", extra_tokens=3))
    for text in "uvw":
        fleet.admit_load("b", admit(f"l-{text}", text))
    reply = fleet.step("b", running=(runs("r", 9), runs("s", 9)))
    assert (reply.cancel_loads, reply.preempted) == (("l-w", "l-v"), ())


def test_a_load_is_cancelled_once_even_when_its_request_is_released_later() -> None:
    fleet = two_running_and_a_load()
    assert fleet.step("b", running=(runs("r", 9),)).cancel_loads == ("l",)
    assert fleet.step("b", releases=(release("l"),)).cancel_loads == ()
    assert fleet.step("b", load_results=(loaded("l", 0),)).preempted == ()


def test_no_more_is_loaded_than_is_used(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    # The last token of an aligned prompt is computed, so its block is not fetched.
    assert len(load_blocks(fleet.admit_load("b", admit("r", "xyz", extra_tokens=0)))) == 2
    fleet.register("c")
    assert len(load_blocks(fleet.admit_load("c", admit("s", "xyz", target_tokens=4)))) == 1


def test_progress_behind_the_load_of_the_same_step_is_refused(fleet: Fleet) -> None:
    fleet.cache("a", "xyz")
    fleet.admit_load("b", admit("r", "xyz"))
    with pytest.raises(BadInputError, match="num_computed_tokens; given: 0; allowed: 12 to"):
        fleet.step("b", load_results=(loaded("r", 12),), progress=(wrote("r", 0, 13),))
    fleet.step("b", load_results=(loaded("r", 12),), progress=(wrote("r", 12, 13),))


@pytest.mark.parametrize("ahead", [-1, "4", 1.0, True])
def test_slots_ahead_are_a_number_of_tokens(fleet: Fleet, ahead: Any) -> None:
    with pytest.raises(BadInputError, match="ahead_tokens"):
        fleet.step("a", ahead_tokens=ahead)


def test_a_failed_load_of_several_groups_gives_all_back_and_is_no_preemption() -> None:
    fleet = Fleet(identity=HYBRID)
    fleet.register("a", num_blocks=40)
    fleet.register("b", num_blocks=40)
    fleet.cache("a", "xyzw")
    fleet.admit_load("b", admit("r", "xyzw"))
    reply = fleet.step("b", load_results=(loaded("r", 0, failed(0)),))
    assert reply.preempted == ("r",)
    assert fleet.num_free("b") == 39
    counters = fleet.describe().counters
    assert (counters["failed_loads"], counters["preemptions"]) == (1, 0)
    fleet.admit_load("b", admit("s", "xyzw"))
    with pytest.raises(BadInputError, match="one or the other"):
        fleet.step("b", load_results=(loaded("s", 4, failed(1)),))
