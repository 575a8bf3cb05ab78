"""Loads that fail: what is forgotten, and who is asked next."""

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
)

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import GroupId, InstanceId
from kvferry.proto.messages import Tick


def fleet_with(*holders: str, text: str = "xyz", **settings: Any) -> Fleet:
    """Holders have the text; d has nothing."""
    fleet = Fleet(**settings)
    for name in (*holders, "d"):
        fleet.register(name, num_blocks=40)
    for name in holders:
        fleet.cache(name, text)
    return fleet


def test_the_rest_of_a_failed_load_comes_from_another_holder_into_the_same_blocks() -> None:
    fleet = fleet_with("a", "b")
    first = fleet.admit_load("d", admit("r", "xyz"))
    assert first.source.instance_id == "a"
    fleet.now = 20.0
    reply = fleet.step("d", load_results=(loaded("r", 4, failed(1)),), running=(runs("r", 13),))
    (again,) = reply.loads
    assert (again.source.instance_id, again.num_hit_blocks) == ("b", 1)
    assert again.block_ids == first.block_ids
    assert again.ttl_s == 40.0
    assert reply.scheduled == ()
    # What came is findable, the first source is free, and the second keeps the rest.
    assert fleet.locate("xyz")["d"] == 1
    assert (fleet.num_free("a"), fleet.num_free("b")) == (39, 37)
    done = fleet.step("d", load_results=(loaded("r", 12),), running=(runs("r", 13),))
    assert [num_granted(s) for s in done.scheduled] == [1]
    assert fleet.stats("d").first.remote_hit == 12
    counters = fleet.describe().counters
    assert (counters["failed_loads"], counters["repeated_loads"]) == (1, 1)


def test_no_holder_is_asked_twice_and_then_the_rest_is_computed() -> None:
    fleet = fleet_with("a", "b")
    fleet.admit_load("d", admit("r", "xyz"))
    (again,) = fleet.step("d", load_results=(loaded("r", 0, failed(0)),)).loads
    assert again.source.instance_id == "b"
    reply = fleet.step("d", load_results=(loaded("r", 4, failed(1)),), running=(runs("r", 13),))
    assert reply.loads == ()
    assert [(s.num_computed_tokens, num_granted(s)) for s in reply.scheduled] == [(4, 9)]


def test_a_load_goes_on_as_far_as_the_next_holder_has_it() -> None:
    fleet = fleet_with("a", text="xyzw")
    fleet.register("b", num_blocks=40)
    fleet.cache("b", "xy")
    first = fleet.admit_load("d", admit("r", "xyzw"))
    (again,) = fleet.step("d", load_results=(loaded("r", 4, failed(1)),)).loads
    assert again.source.instance_id == "b"
    assert load_blocks(again) == load_blocks(first)[:2]
    (held,) = [i.held for i in fleet.describe().instances if i.info.instance_id == "d"]
    assert (held.loads, held.loading_blocks) == (1, 1)
    reply = fleet.step("d", load_results=(loaded("r", 8),), running=(runs("r", 17),))
    (scheduled,) = reply.scheduled
    assert (scheduled.num_computed_tokens, num_granted(scheduled)) == (8, 9)
    assert len(new_blocks(scheduled)) == 1  # four are in its table already


def test_a_holder_that_has_no_more_than_came_is_not_asked() -> None:
    fleet = fleet_with("a")
    fleet.register("b", num_blocks=40)
    fleet.cache("b", "x")
    fleet.admit_load("d", admit("r", "xyz"))
    assert fleet.step("d", load_results=(loaded("r", 4, failed(1)),)).loads == ()


def test_after_its_deadline_a_load_goes_on_nowhere() -> None:
    fleet = fleet_with("a", "b")
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.now = 60.0
    assert fleet.step("d", load_results=(loaded("r", 0, failed(0)),)).loads == ()


def test_a_request_that_is_released_with_its_failed_load_does_not_load_again() -> None:
    fleet = fleet_with("a", "b")
    fleet.admit_load("d", admit("r", "xyz"))
    reply = fleet.step("d", load_results=(loaded("r", 0, failed(0)),), releases=(release("r"),))
    assert (reply.loads, reply.preempted, fleet.num_free("d")) == ((), (), 39)
    assert fleet.describe().num_leases == 0


def test_with_several_groups_only_a_holder_of_everything_asked_for_goes_on() -> None:
    fleet = fleet_with("a", "b", text="xyzw", identity=HYBRID)
    first = fleet.admit_load("d", admit("r", "xyzw"))
    reply = fleet.step("d", load_results=(loaded("r", 0, failed(1)),))
    (again,) = reply.loads
    assert (again.source.instance_id, again.block_ids) == ("b", first.block_ids)
    assert reply.preempted == ()
    fleet.step("d", load_results=(loaded("r", 16),))
    assert fleet.locate("xyzw")["d"] == 4


def test_with_several_groups_a_holder_of_less_is_of_no_use() -> None:
    fleet = fleet_with("a", text="xyzw", identity=HYBRID)
    fleet.register("b", num_blocks=40)
    fleet.cache("b", "xy")
    fleet.admit_load("d", admit("r", "xyzw"))
    reply = fleet.step("d", load_results=(loaded("r", 0, failed(1)),))
    assert (reply.loads, reply.preempted, fleet.num_free("d")) == ((), ("r",), 39)


@pytest.mark.parametrize("error_type", ["NotFoundError", "StaleError"])
def test_b37_what_a_holder_said_it_lacks_is_promised_to_nobody(error_type: str) -> None:
    fleet = fleet_with("a")
    fleet.admit_load("d", admit("r", "xyz"))
    failure = failed(2, error_type)
    reply = fleet.step(
        "d",
        load_results=(loaded("r", 8, failure),),
        running=(runs("r", 13),),
        # The very same step may not promise it to the next one either.
        waiting=(admit("s", "xyzw"),),
    )
    assert reply.loads == ()
    assert fleet.locate("xyz") == {"a": 2, "d": 2}
    # Its own requests must not read the block either.
    assert fleet.admit("a", admit("t", "xyz")).num_computed_tokens == 8
    assert fleet.num_free("a") == 39 - 4


def test_all_copies_of_a_block_that_a_holder_lacks_are_forgotten() -> None:
    fleet = fleet_with("a")
    fleet.compute("a", admit("copy", "xy", extra_tokens=0, allow_remote=False))
    assert fleet.locate("xyz")["a"] == 3
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.step("d", load_results=(loaded("r", 4, failed(1, "NotFoundError")),))
    assert fleet.locate("xyz")["a"] == 1


def test_what_a_load_has_after_the_block_that_is_gone_is_forgotten_too() -> None:
    fleet = Fleet()
    fleet.register("a", num_blocks=40)
    fleet.register("d", num_blocks=40, covers=2)
    fleet.cache("a", "abcdef")
    fleet.admit_load("d", admit("r", "abcdef"))
    fleet.step("d", load_results=(loaded("r", 8, failed(1, "NotFoundError")),))
    # Which of the taker's second block a lacks, c or d, is not known, nor what else it has lost.
    pool = fleet.service.state.instance(InstanceId("a")).manager.pool
    held = [pool.get_cached_block(key, GroupId(0)) is not None for key in chain("abcdef")]
    assert held == [True, True, False, False, False, False]


@pytest.mark.parametrize("error_type", ["UnavailableError", "DeadlineError", "TransferError"])
def test_a_holder_in_trouble_is_still_believed_to_have_its_blocks(error_type: str) -> None:
    fleet = fleet_with("a")
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.step("d", load_results=(loaded("r", 4, failed(1, error_type)),))
    assert fleet.locate("xyz")["a"] == 3


def test_without_its_lease_the_holders_own_pool_knows_better() -> None:
    fleet = fleet_with("a")
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.now = 60.0
    fleet.send(Tick())
    fleet.step("d", load_results=(loaded("r", 4, failed(1, "NotFoundError")),))
    assert fleet.locate("xyz")["a"] == 3


def test_a_forgotten_block_stays_with_the_requests_that_share_it() -> None:
    fleet = fleet_with("a")
    fleet.admit("a", admit("s", "xyz"))
    fleet.admit("a", admit("t", "xyz"))
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.step("d", load_results=(loaded("r", 0, failed(0, "NotFoundError")),))
    assert fleet.locate("xyz")["a"] == 0
    fleet.step("a", releases=(release("s"), release("t")))
    assert fleet.num_free("a") == 39


def test_a_load_that_goes_on_gives_way_like_any_other() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.register(name)
        fleet.cache(name, "xyz")
    fleet.register("d", num_blocks=8)
    fleet.compute("d", admit("p", "p", extra_tokens=3))
    fleet.compute("d", admit("q", "q", extra_tokens=3))
    fleet.admit_load("d", admit("r", "xyz"))
    reply = fleet.step("d", load_results=(loaded("r", 0, failed(0)),), running=(runs("p", 9),))
    assert [load.request_id for load in reply.loads] == ["r"]
    assert (reply.cancel_loads, reply.preempted) == (("r",), ())
    stopped = loaded("r", 0, failed(0, "Cancelled"))
    ended = fleet.step("d", load_results=(stopped,), running=(runs("p", 9),))
    assert (ended.loads, ended.preempted) == ((), ("r",))
    assert [s.request_id for s in ended.scheduled] == ["p"]


def test_a_handoff_lasts_until_its_load_has_ended_somewhere() -> None:
    fleet = fleet_with("b", "p")
    fleet.open_handoff("r", "p", "d")
    fleet.admit("p", admit("r", "xyz", allow_remote=False))
    fleet.step("p", releases=(release("r", handoff=True),))
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.step("d", load_results=(loaded("r", 4, failed(1)),))
    assert fleet.describe().num_handoffs == 1
    fleet.step("d", load_results=(loaded("r", 12),))
    assert fleet.describe().num_handoffs == 0
    assert fleet.describe().counters["handoffs_done"] == 1


@pytest.mark.parametrize(("group", "block"), [(1, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_failure_is_about_a_block_that_was_asked_for(group: int, block: int) -> None:
    fleet = fleet_with("a")
    fleet.admit_load("d", admit("r", "xyz"))
    with pytest.raises(BadInputError, match="allowed: blocks 0 to 2 of groups 0 to 0"):
        fleet.step("d", load_results=(loaded("r", 4, failed(block, "NotFoundError", group)),))
    assert fleet.locate("xyz")["a"] == 3
