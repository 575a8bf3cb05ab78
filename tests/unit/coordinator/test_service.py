"""Membership, finding, leases and handoffs, through the service's door."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.coordinator.fleet import (
    HYBRID,
    IDENTITY,
    SCHEME,
    Fleet,
    admit,
    chain,
    failed,
    info,
    loaded,
    release,
)

from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    IdentityMismatchError,
    MismatchError,
    NotFoundError,
    NotRegisteredError,
    SchemeMismatchError,
    StaleError,
)
from kvferry.proto.ids import InstanceId, LeaseId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import (
    AcquireLease,
    Done,
    Leased,
    Locate,
    Located,
    Registered,
    RegisterInstance,
    ReleaseLease,
    RenewLease,
    Tick,
)

# --- membership ----------------------------------------------------------------------------------


def test_an_identical_registration_is_accepted_again_and_keeps_the_blocks(fleet: Fleet) -> None:
    fleet.cache("a", "x")
    command = RegisterInstance(call_id="again", info=info("a"))
    assert fleet.ask(command, Registered) == Registered(epoch=fleet.service.epoch)
    assert fleet.locate("x")["a"] == 1


def test_another_process_under_a_live_name_is_refused_naming_both(fleet: Fleet) -> None:
    with pytest.raises(MismatchError, match=r"rank_pids=\(2,\); allowed: rank_pids=\(1,\)"):
        fleet.register("a", rank_pids=(2,))


def test_a_later_life_replaces_the_earlier_one_with_all_it_had(fleet: Fleet) -> None:
    fleet.cache("a", "x")
    fleet.lease("x")
    fleet.register("a", incarnation=2)
    assert fleet.locate("x") == {"a": 0, "b": 0}
    assert fleet.describe().num_leases == 0
    with pytest.raises(StaleError, match="given: 1; allowed: 2"):
        fleet.register("a", incarnation=1)
    with pytest.raises(StaleError, match="given: 1; allowed: 2"):
        fleet.remove("a", incarnation=1)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"scheme": replace(SCHEME, none_hash=b"\x02" * 32)}, SchemeMismatchError, "none_hash=02"),
        ({"identity": replace(IDENTITY, head_size=16)}, IdentityMismatchError, "head_size=16"),
        (
            {"layout": Layout(block_tokens=6)},
            ConfigError,
            "virtual_block_tokens=6; allowed: multiples of hash_block_tokens=4",
        ),
        (
            {"layout": Layout(block_tokens=4, pp=99)},
            ConfigError,
            "instance c: the stages must share the model's layers.*pp=99",
        ),
        ({"num_blocks": 1}, ConfigError, "num_blocks .*given: 1; allowed: an integer >= 2"),
        ({"num_blocks": True}, ConfigError, "given: True"),
        ({"max_model_len": 0}, ConfigError, "max_model_len .*given: 0"),
        ({"version": "0.2.0"}, MismatchError, "version=0.2.0; allowed: version=0.1.0"),
    ],
)
def test_a_member_that_could_not_work_is_refused_with_both_values(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    fleet = Fleet(expected_identity=IDENTITY)
    fleet.register("a")
    with pytest.raises(error, match=text):
        fleet.register("c", **changes)
    assert list(fleet.service.state.instances) == ["a"]


def test_a_layout_that_vllm_would_not_start_is_refused_with_the_rule() -> None:
    fleet = Fleet(expected_identity=HYBRID)
    layout = Layout(block_tokens=2, kind="vllm", tp=2, dcp=2)
    with pytest.raises(ConfigError, match="a: vLLM deals no tokens of layers of kind sliding_win"):
        fleet.register("a", identity=HYBRID, layout=layout)


def test_removing_an_instance_twice_changes_nothing_the_second_time(fleet: Fleet) -> None:
    assert fleet.remove("a")
    assert not fleet.remove("a")
    with pytest.raises(NotRegisteredError, match=r"given: a; allowed: \['b'\]"):
        fleet.step("a")


def test_a_removed_instance_takes_its_blocks_leases_and_handoffs_along(fleet: Fleet) -> None:
    fleet.register("c")
    fleet.cache("a", "xyz")
    fleet.cache("b", "q")
    fleet.admit_load("c", admit("r", "xyz"))
    fleet.admit_load("c", admit("s", "q"))
    fleet.lease("xyz")
    fleet.open_handoff("h", "a", "b")
    fleet.remove("a")
    described = fleet.describe()
    assert (described.num_leases, described.num_handoffs) == (1, 0)
    assert described.counters["handoffs_failed"] == 1
    assert fleet.locate("xyz") == {"b": 0, "c": 0}
    # The other way round: what was leased for the removed one comes back at its source.
    assert fleet.num_free("b") == 8
    fleet.remove("c")
    assert fleet.num_free("b") == 9
    assert fleet.describe().num_leases == 0


# --- finding -------------------------------------------------------------------------------------


def test_holders_come_longest_first_then_least_loaded_then_by_id(fleet: Fleet) -> None:
    fleet.register("c")
    fleet.cache("c", "xy")
    fleet.compute("a", admit("busy", "q", allow_remote=False))
    located = fleet.ask(Locate(identity_digest=IDENTITY.digest(), hashes=chain("xyz")), Located)
    shown = [(h.source.instance_id, h.num_hashes, h.num_requests) for h in located.holders]
    assert shown == [("c", 2, 0), ("b", 0, 0), ("a", 0, 1)]


def test_only_instances_of_the_identity_are_located(fleet: Fleet) -> None:
    other = replace(IDENTITY, weight_version="2")
    fleet.register("v2", identity=other)
    fleet.cache("a", "x")
    located = fleet.ask(Locate(identity_digest=other.digest(), hashes=chain("x")), Located)
    assert [(h.source.instance_id, h.num_hashes) for h in located.holders] == [("v2", 0)]
    assert fleet.step("v2", waiting=(admit("r", "x"),)).loads == ()


# --- leases --------------------------------------------------------------------------------------


def test_a_leased_block_stays_until_the_deadline(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    leased = fleet.lease("xyz", ttl_s=10.0)
    assert leased.source is not None
    assert (leased.source.instance_id, leased.num_hashes, leased.ttl_s) == ("a", 2, 10.0)
    assert fleet.num_free("a") == 7
    fleet.now = 9.9
    assert fleet.ask(Tick(), Done) == Done(changed=False)
    assert fleet.num_free("a") == 7
    fleet.now = 10.0
    assert fleet.ask(Tick(), Done) == Done(changed=True)
    assert fleet.num_free("a") == 9
    assert fleet.describe().counters["expired_leases"] == 1


def test_any_command_ends_what_is_past_its_deadline(fleet: Fleet) -> None:
    fleet.cache("a", "x")
    fleet.lease("x", ttl_s=1.0)
    fleet.now = 2.0
    assert fleet.describe().num_leases == 0


def test_a_lease_can_be_renewed_up_to_the_cap_and_released_once() -> None:
    fleet = Fleet(lease_cap_s=20.0)
    fleet.register("a")
    fleet.cache("a", "x")
    leased = fleet.lease("x", ttl_s=10.0)
    assert leased.lease_id is not None
    fleet.now = 5.0
    renew = RenewLease(call_id="renew", lease_id=leased.lease_id, ttl_s=100.0)
    assert fleet.ask(renew, Leased).ttl_s == 15.0
    for call_id, changed in (("first", True), ("second", False)):
        command = ReleaseLease(call_id=call_id, lease_id=leased.lease_id)
        assert fleet.ask(command, Done).changed is changed
    assert fleet.num_free("a") == 9
    with pytest.raises(NotFoundError, match="lease"):
        fleet.send(RenewLease(call_id="late", lease_id=leased.lease_id, ttl_s=1.0))


def test_nothing_is_leased_where_nobody_holds_the_first_block(fleet: Fleet) -> None:
    nothing = Leased(lease_id=None, source=None, num_hashes=0, ttl_s=0.0)
    assert fleet.lease("x") == nothing
    fleet.cache("a", "x")
    assert fleet.lease("x", at="b") == nothing
    assert fleet.describe().num_leases == 0


def test_a_lease_at_an_unknown_or_foreign_instance_is_refused(fleet: Fleet) -> None:
    fleet.register("v2", identity=replace(IDENTITY, weight_version="2"))
    with pytest.raises(NotFoundError, match="zz"):
        fleet.lease("x", at="zz")
    with pytest.raises(IdentityMismatchError, match="v2"):
        fleet.lease("x", at="v2")
    with pytest.raises(BadInputError, match="ttl_s"):
        fleet.lease("x", ttl_s=0.0)


# --- handoffs ------------------------------------------------------------------------------------


def prefill_done(fleet: Fleet) -> None:
    """Request r: a has computed x, y and handed over to b."""
    fleet.open_handoff("r", "a", "b", ttl_s=30.0)
    fleet.compute("a", admit("r", "xy", target_tokens=8, allow_remote=False))
    fleet.step("a", releases=(release("r", handoff=True),))


def test_a_handoff_keeps_the_prefilled_blocks_until_the_decode_side_has_them(
    fleet: Fleet,
) -> None:
    prefill_done(fleet)
    assert fleet.num_free("a") == 7
    fleet.admit_load("b", admit("r", "xy"))
    assert fleet.service.state.handoffs[admit("r", "").request_id].state.value == "pulling"
    fleet.step("b", load_results=(loaded("r", 8),))
    assert fleet.num_free("a") == 9
    assert fleet.describe().num_handoffs == 0
    assert fleet.describe().counters["handoffs_done"] == 1


def test_a_handoff_is_done_when_the_decode_side_needs_no_load(fleet: Fleet) -> None:
    fleet.cache("b", "xy")
    prefill_done(fleet)
    fleet.admit("b", admit("r", "xy"))
    assert (fleet.num_free("a"), fleet.describe().num_handoffs) == (9, 0)


def test_a_cancelled_pull_leaves_the_handoff_ready_for_another(fleet: Fleet) -> None:
    prefill_done(fleet)
    fleet.admit_load("b", admit("r", "xy"))
    handoff = next(iter(fleet.service.state.handoffs.values()))
    fleet.service.state.instances[InstanceId("b")].loads[handoff.request_id].cancelled = True
    assert fleet.step("b", load_results=(loaded("r", 0),)).preempted == ("r",)
    assert (handoff.state.value, fleet.num_free("a")) == ("ready", 7)


def test_an_aborted_pull_fails_the_handoff_when_its_writer_is_closed(fleet: Fleet) -> None:
    prefill_done(fleet)
    fleet.admit_load("b", admit("r", "xy"))
    fleet.step("b", releases=(release("r"),))
    assert (fleet.num_free("a"), fleet.num_free("b")) == (7, 7)
    fleet.step("b", load_results=(loaded("r", 0, failed(0, "Cancelled")),))
    assert (fleet.num_free("a"), fleet.num_free("b")) == (9, 9)
    assert fleet.describe().counters["handoffs_failed"] == 1


def test_a_handoff_past_its_deadline_gives_the_blocks_back(fleet: Fleet) -> None:
    prefill_done(fleet)
    fleet.now = 30.0
    fleet.send(Tick())
    assert (fleet.num_free("a"), fleet.describe().num_handoffs) == (9, 0)
    assert fleet.effects[-1].kind == "handoff_expired"
    assert fleet.locate("xy")["a"] == 2


def test_a_release_without_a_taker_just_frees(fleet: Fleet) -> None:
    fleet.compute("a", admit("r", "xy"))
    fleet.step("a", releases=(release("r", handoff=True),))
    assert fleet.num_free("a") == 9
    assert fleet.describe().counters["handoffs_without_taker"] == 1


def test_a_handoff_can_be_closed_once(fleet: Fleet) -> None:
    prefill_done(fleet)
    assert fleet.close_handoff("r")
    assert not fleet.close_handoff("r")
    assert fleet.num_free("a") == 9


def test_a_second_handoff_of_a_request_takes_the_place_of_the_first(fleet: Fleet) -> None:
    prefill_done(fleet)
    fleet.open_handoff("r", "b", "a")
    assert fleet.num_free("a") == 9
    assert fleet.describe().num_handoffs == 1


def test_a_handoff_between_strangers_is_refused(fleet: Fleet) -> None:
    fleet.register("v2", identity=replace(IDENTITY, weight_version="2"))
    with pytest.raises(NotFoundError, match="zz"):
        fleet.open_handoff("r", "a", "zz")
    with pytest.raises(IdentityMismatchError, match="weight_version"):
        fleet.open_handoff("r", "a", "v2")
    with pytest.raises(BadInputError, match="ttl_s"):
        fleet.open_handoff("r", "a", "b", ttl_s=-1.0)
    assert fleet.describe().num_handoffs == 0


# --- the rest ------------------------------------------------------------------------------------


def test_a_description_counts_blocks_without_the_null_block(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    fleet.compute("a", admit("r", "q"))
    status = next(s for s in fleet.describe().instances if s.info.instance_id == "a")
    counts = (status.num_used_blocks, status.num_free_blocks, status.num_cached_blocks)
    assert (counts, status.num_requests) == ((2, 7, 3), 1)


def test_a_refused_command_may_be_sent_again_under_its_id(fleet: Fleet) -> None:
    fleet.cache("a", "x")
    bad = RenewLease(call_id="same", lease_id=LeaseId("lease-1-1"), ttl_s=1.0)
    with pytest.raises(NotFoundError):
        fleet.send(bad)
    assert fleet.lease("x").lease_id == "lease-1-1"
    assert fleet.ask(bad, Leased).ttl_s == 1.0


def test_one_id_serves_one_call_of_each_kind(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    digest = info("a").identity.digest()
    acquire = AcquireLease(call_id="theirs", identity_digest=digest, hashes=chain("x"), ttl_s=5.0)
    leased = fleet.ask(acquire, Leased)
    assert fleet.ask(acquire, Leased) == leased
    with pytest.raises(BadInputError, match="same call_id; given: theirs"):
        fleet.send(replace(acquire, hashes=chain("xy")))
    assert leased.lease_id is not None
    release = ReleaseLease(call_id="theirs", lease_id=leased.lease_id)
    assert fleet.ask(release, Done).changed
    assert fleet.describe().num_leases == 0


def test_something_that_is_no_command_is_refused(fleet: Fleet) -> None:
    with pytest.raises(BadInputError, match="given: Done"):
        fleet.send(Done(changed=True))  # type: ignore[arg-type]
