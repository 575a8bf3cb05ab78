"""Several requests of an instance that want the same blocks of a peer: one load, no duplicates."""

import pytest
from tests.unit.coordinator.fleet import (
    HYBRID,
    Fleet,
    admit,
    failed,
    load_blocks,
    loaded,
    num_granted,
    release,
    runs,
)

from kvferry.coordinator.instances import LoadInFlight
from kvferry.coordinator.invariants import check
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import InstanceId, LeaseId, RequestId
from kvferry.proto.step_messages import StepReply


@pytest.fixture
def fleet() -> Fleet:
    """Holder a has xyz and pq, d has nothing."""
    fleet = Fleet()
    for name in ("a", "d"):
        fleet.register(name, num_blocks=40)
    fleet.cache("a", "xyz")
    fleet.cache("a", "pq")
    return fleet


def names(reply: StepReply) -> tuple[list[str], list[str]]:
    """Return who loads, and who may compute."""
    return [load.request_id for load in reply.loads], [s.request_id for s in reply.scheduled]


def test_of_several_in_one_step_only_the_first_loads_and_holds_blocks(fleet: Fleet) -> None:
    asks = (admit("r", "xyz"), admit("s", "xyz"), admit("t", "xyz"))
    assert names(fleet.step("d", waiting=asks)) == (["r"], [])
    assert fleet.num_free("d") == 36
    assert fleet.describe().num_leases == 1


def test_who_waits_keeps_nobody_back(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    asks = (admit("s", "xyz"), admit("t", "pq"), admit("u", "v"))
    assert names(fleet.step("d", waiting=asks)) == (["t"], ["u"])


def test_when_it_has_arrived_all_share_it(fleet: Fleet) -> None:
    load = fleet.admit_load("d", admit("r", "xyz"))
    reply = fleet.step(
        "d",
        load_results=(loaded("r", 12),),
        running=(runs("r", 13),),
        waiting=(admit("s", "xyz"), admit("t", "xyz")),
    )
    assert names(reply) == ([], ["r", "s", "t"])
    shared = [s.new_block_ids[0][:3] for s in reply.scheduled[1:]]
    assert shared == [load_blocks(load), load_blocks(load)]
    assert [num_granted(s) for s in reply.scheduled] == [1, 1, 1]


def test_who_wants_more_waits_and_then_loads_the_rest(fleet: Fleet) -> None:
    fleet.cache("a", "xyzw")
    fleet.admit_load("d", admit("r", "xy"))
    assert names(fleet.step("d", waiting=(admit("s", "xyzw"),))) == ([], [])
    reply = fleet.step("d", load_results=(loaded("r", 8),), waiting=(admit("s", "xyzw"),))
    (load,) = reply.loads
    assert (load.request_id, load.num_hit_blocks, len(load_blocks(load))) == ("s", 2, 4)


def test_what_is_only_alike_further_on_is_no_reason_to_wait(fleet: Fleet) -> None:
    fleet.cache("a", "pyz")
    fleet.admit_load("d", admit("r", "xyz"))
    assert names(fleet.step("d", waiting=(admit("s", "pyz"),))) == (["s"], [])


def test_after_a_failure_the_next_one_takes_over_with_what_has_come(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    reply = fleet.step(
        "d",
        load_results=(loaded("r", 4, failed(1)),),
        running=(runs("r", 13),),
        waiting=(admit("s", "xyz"),),
    )
    assert names(reply) == (["s"], ["r"])
    assert reply.loads[0].num_hit_blocks == 1


def test_while_the_first_load_goes_on_elsewhere_the_others_go_on_waiting(fleet: Fleet) -> None:
    fleet.register("b", num_blocks=40)
    fleet.cache("b", "xyz")
    fleet.admit_load("d", admit("r", "xyz"))
    reply = fleet.step("d", load_results=(loaded("r", 4, failed(1)),), waiting=(admit("s", "xyz"),))
    assert names(reply) == (["r"], [])


def test_when_the_first_one_is_aborted_the_next_one_takes_over_with_what_has_come(
    fleet: Fleet,
) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    # Its writer is still open: two at once are never right.
    assert names(fleet.step("d", releases=(release("r"),), waiting=(admit("s", "xyz"),))) == (
        [],
        [],
    )
    stopped = loaded("r", 8, failed(2, "Cancelled"))
    reply = fleet.step("d", load_results=(stopped,), waiting=(admit("s", "xyz"),))
    (load,) = reply.loads
    assert (load.request_id, load.num_hit_blocks) == ("s", 2)


def test_who_asks_no_peer_does_not_wait_for_one(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    reply = fleet.step("d", waiting=(admit("s", "xyz", allow_remote=False),))
    assert names(reply) == ([], ["s"])


def test_when_no_peer_has_it_any_more_nobody_waits_for_a_load_of_it(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.remove("a")
    assert names(fleet.step("d", waiting=(admit("s", "xyz"),))) == ([], ["s"])


@pytest.mark.parametrize(("text", "waits"), [("xyzw", True), ("xyzwv", True), ("xy", False)])
def test_with_several_groups_only_a_load_that_ends_within_ones_own_prefix_helps(
    text: str, waits: bool
) -> None:
    fleet = Fleet(identity=HYBRID)
    for name in ("a", "d"):
        fleet.register(name, num_blocks=60)
    fleet.cache("a", "xy", request="short")
    fleet.cache("a", "xyzw", request="long")
    fleet.cache("a", "xyzwv", request="longer")
    fleet.admit_load("d", admit("r", "xyzw"))
    assert names(fleet.step("d", waiting=(admit("s", text),))) == ([] if waits else ["s"], [])


def test_two_loads_of_one_block_are_noticed(fleet: Fleet) -> None:
    fleet.admit_load("d", admit("r", "xyz"))
    fleet.admit_load("d", admit("s", "pq"))
    instance = fleet.service.state.instances[InstanceId("d")]
    instance.requests[RequestId("s")].hashes = list(instance.requests[RequestId("r")].hashes)
    instance.loads[RequestId("s")] = LoadInFlight(
        lease_id=LeaseId("?"), hit_tokens=0, asked_tokens=4, deadline_s=1.0, tried=()
    )
    with pytest.raises(InvariantError, match=r"loads that bring block .*; given: 2; allowed: 1"):
        check(fleet.service)
