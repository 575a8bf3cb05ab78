"""What the coordinator says to transfers that end late, twice or never; the number names the case.

Transfers themselves are in `tests/integration/test_cases_transfer.py` and
`tests/contract/test_cases_pull.py`.
"""

from typing import Any

import pytest
from tests.unit.coordinator.fleet import (
    Fleet,
    admit,
    chain,
    failed,
    load_blocks,
    loaded,
    release,
    wrote,
)

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import FIRST_GROUP, InstanceId
from kvferry.proto.messages import Tick
from kvferry.proto.step_messages import StepReply

STEP_LEASE_S = 60.0


@pytest.fixture
def fleet() -> Fleet:
    """Instance "p" holds a prompt of three blocks, and "d" is empty."""
    fleet = Fleet(step_lease_s=STEP_LEASE_S)
    fleet.register("p")
    fleet.register("d")
    fleet.cache("p", "xyz")
    return fleet


@pytest.mark.parametrize("late_s", [-0.001, 0.0, 0.001])
def test_b34d_a_load_that_ended_whole_counts_when_it_is_told_after_the_deadline(
    fleet: Fleet, late_s: float
) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.now = STEP_LEASE_S + late_s
    fleet.step("d", load_results=(loaded("r", 12),))
    assert fleet.locate("xyz") == {"p": 3, "d": 3}
    assert fleet.describe().counters["failed_loads"] == 0
    assert (fleet.describe().num_leases, fleet.num_free("p")) == (0, 9)


def test_b34_a_load_that_failed_is_counted_once_and_makes_nothing_findable(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    for _ in range(2):
        fleet.step("d", load_results=(loaded("r", 0, failed(0)),))
        assert fleet.locate("xyz") == {"p": 3, "d": 0}
    counters = fleet.describe().counters
    assert (counters["failed_loads"], counters["ignored_messages"]) == (1, 1)
    assert (fleet.describe().num_leases, fleet.num_free("p")) == (0, 9)


def evict(fleet: Fleet, name: str, text: str, index: int) -> None:
    """Let an instance's pool forget one block of a cached text."""
    pool = fleet.service.state.instance(InstanceId(name)).manager.pool
    block = pool.get_cached_block(chain(text)[index], FIRST_GROUP)
    assert block is not None
    pool.evict_blocks([block])
    fleet.service.state.follow_pools()


@pytest.mark.parametrize(("index", "num_left"), [(2, 2), (0, 0)])
def test_b37_a_block_that_is_evicted_after_a_lookup_is_promised_to_nobody_again(
    fleet: Fleet, index: int, num_left: int
) -> None:
    assert fleet.locate("xyz") == {"p": 3, "d": 0}
    evict(fleet, "p", "xyz", index)
    reply = fleet.step("d", waiting=(admit("r", "xyz"),))
    assert [len(load_blocks(load)) for load in reply.loads] == ([num_left] if num_left else [])
    assert fleet.lease("xyz").num_hashes == num_left
    assert fleet.locate("xyz")["p"] == num_left


def test_b37_what_a_load_was_promised_is_leased_until_it_has_ended(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    # All that is left of the pool goes to others, and not a block of the promise.
    fleet.compute("p", admit("other", "123456", extra_tokens=0, allow_remote=False))
    assert fleet.num_free("p") == 0
    assert fleet.locate("xyz")["p"] == 3
    fleet.step("d", load_results=(loaded("r", 12),))
    assert fleet.num_free("p") == 3


def test_b38b_blocks_handed_over_to_a_decode_side_that_was_killed_come_back(fleet: Fleet) -> None:
    """With the lease, if nobody tells that it is gone."""
    fleet.open_handoff("r", "p", "d", ttl_s=5.0)
    fleet.compute("p", admit("r", "abc", extra_tokens=0))
    fleet.step("p", releases=(release("r", handoff=True),))
    assert fleet.num_free("p") == 6
    fleet.now = 4.999
    fleet.send(Tick())
    assert fleet.num_free("p") == 6
    fleet.now = 5.0
    fleet.send(Tick())
    assert (fleet.num_free("p"), fleet.describe().counters["handoffs_expired"]) == (9, 1)
    fleet.open_handoff("s", "p", "d", ttl_s=5.0)
    fleet.compute("p", admit("s", "def", extra_tokens=0))
    fleet.step("p", releases=(release("s", handoff=True),))
    fleet.remove("d")
    assert (fleet.num_free("p"), fleet.describe().num_handoffs) == (9, 0)


def test_b39_a_result_and_the_release_of_its_request_in_one_step_free_once(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    assert fleet.num_free("d") == 6
    fleet.step(
        "d", load_results=(loaded("r", 0, failed(0, "Cancelled")),), releases=(release("r"),)
    )
    assert (fleet.num_free("d"), fleet.describe().num_leases) == (9, 0)
    assert fleet.describe().counters["ignored_messages"] == 0


def test_b39_one_of_two_readers_of_a_block_that_ends_leaves_it_to_the_other(fleet: Fleet) -> None:
    """What is sent and what is received has a reference each, not a flag for both."""
    fleet.cache("d", "x", request="seed-d")
    (receiving, *_) = load_blocks(fleet.admit_load("d", admit("r", "xyz")))
    sending = fleet.lease("x", at="d")
    assert sending.lease_id is not None
    pool = fleet.service.state.instance(InstanceId("d")).manager.pool
    assert pool.ref_count(receiving) == 2
    fleet.step(
        "d", load_results=(loaded("r", 4, failed(1, "Cancelled")),), releases=(release("r"),)
    )
    assert pool.ref_count(receiving) == 1
    assert fleet.service.state.end_lease(sending.lease_id)
    assert not fleet.service.state.end_lease(sending.lease_id)
    assert (pool.ref_count(receiving), fleet.num_free("d")) == (0, 9)


def test_b39_the_same_request_twice_in_one_batch_is_refused_and_changes_nothing(
    fleet: Fleet,
) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    for parts in (
        {"load_results": (loaded("r", 12), loaded("r", 12))},
        {"releases": (release("r"), release("r"))},
    ):
        with pytest.raises(BadInputError, match="twice"):
            fleet.step("d", **parts)
    assert (fleet.num_free("d"), fleet.describe().num_leases) == (6, 1)
    fleet.step("d", load_results=(loaded("r", 12),), releases=(release("r"),))
    assert (fleet.num_free("d"), fleet.locate("xyz")["d"]) == (9, 3)


def test_b39_completions_of_requests_that_are_gone_are_counted_and_serving_goes_on(
    fleet: Fleet,
) -> None:
    late: dict[str, Any] = {
        "load_results": (loaded("gone", 8), loaded("never seen", 4)),
        "progress": (wrote("gone", 8, 9),),
        "releases": (release("gone"), release("never seen")),
    }
    assert fleet.step("d", **late) == StepReply()
    assert fleet.describe().counters["ignored_messages"] == 5
    assert not fleet.close_handoff("never seen")
    assert len(load_blocks(fleet.admit_load("d", admit("r", "xyz")))) == 3
