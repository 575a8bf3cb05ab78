"""Members that are not heard: suspects after two seconds, dead after ten, and never by mistake."""

import pytest
from tests.unit.coordinator.fleet import (
    IDENTITY,
    Fleet,
    admit,
    failed,
    info,
    loaded,
    release,
)
from tests.unit.coordinator.returning import blocks_command, held_blocks, requests_command

from kvferry.proto.errors import BadInputError, NotRegisteredError, StaleError, UnavailableError
from kvferry.proto.ids import Epoch, InstanceId
from kvferry.proto.messages import Heard, Heartbeat, Tick


@pytest.fixture
def fleet() -> Fleet:
    """Instance a holds x and y, b only x; store holds nothing."""
    fleet = Fleet()
    for name in "ab":
        fleet.register(name)
    fleet.register("store", role="store", max_model_len=0)
    fleet.cache("a", "xy")
    fleet.cache("b", "x")
    return fleet


def test_a_member_is_a_suspect_after_two_seconds_and_forgotten_after_ten(fleet: Fleet) -> None:
    fleet.wait(1.5, "b", "store")
    assert fleet.states() == {"a": "live", "b": "live", "store": "live"}
    fleet.wait(0.5, "b", "store")
    assert fleet.states() == {"a": "suspect", "b": "live", "store": "live"}
    fleet.wait(7.5, "b", "store")
    assert fleet.states()["a"] == "suspect"
    fleet.wait(0.5, "b", "store")
    assert fleet.states() == {"b": "live", "store": "live"}
    counters = fleet.describe().counters
    assert (counters["suspects"], counters["deaths"]) == (1, 1)
    assert [(one.kind, one.detail) for one in fleet.effects[-2:]] == [
        ("instance_suspected", "a was not heard lately"),
        ("instance_died", "a: silent for 10.0 s"),
    ]


def test_a_suspect_is_found_by_nobody_and_all_of_it_is_there_when_it_is_heard_again(
    fleet: Fleet,
) -> None:
    assert fleet.locate("xy") == {"a": 2, "b": 1, "store": 0}
    fleet.wait(2.0, "b", "store")
    assert fleet.locate("xy") == {"b": 1, "store": 0}
    assert fleet.located("xy").avoid == ("a",)
    leased = fleet.lease("xy")
    assert leased.source is not None
    assert (leased.source.instance_id, leased.num_hashes) == ("b", 1)
    assert fleet.lease("xy", at="a").lease_id is None
    fleet.beat("a")
    assert fleet.locate("xy") == {"a": 2, "b": 1, "store": 0}
    assert fleet.located("xy").avoid == ()
    assert fleet.effects[-1].kind == "instance_heard"
    assert fleet.lease("xy", at="a").num_hashes == 2


def test_no_load_comes_from_a_suspect_and_no_handoff_goes_there(fleet: Fleet) -> None:
    fleet.register("c")
    fleet.open_handoff("early", "a", "c")
    fleet.wait(2.0, "b", "c", "store")
    with pytest.raises(UnavailableError, match="not heard for a while; given: a"):
        fleet.open_handoff("late", "a", "c")
    assert fleet.describe().num_handoffs == 1
    load = fleet.admit_load("c", admit("r", "xy"))
    assert load.source.instance_id == "b"
    # What b does not bring is computed.
    reply = fleet.step("c", load_results=(loaded("r", 0, failed(0)),))
    assert reply.loads == ()


def test_what_a_suspect_has_promised_stands_until_it_is_forgotten(fleet: Fleet) -> None:
    fleet.register("c")
    load = fleet.admit_load("c", admit("r", "xy"))
    assert load.source.instance_id == "a"
    fleet.open_handoff("h", "a", "c")
    fleet.wait(9.5, "b", "c", "store")
    assert (fleet.describe().num_leases, fleet.describe().num_handoffs) == (1, 1)
    fleet.wait(0.5, "b", "c", "store")
    assert (fleet.describe().num_leases, fleet.describe().num_handoffs) == (0, 0)
    fleet.step("c", load_results=(loaded("r", 0, failed(0)),))
    assert fleet.describe().counters["failed_loads"] == 1


def test_every_command_of_a_member_is_a_sign_of_life(fleet: Fleet) -> None:
    fleet.wait(1.5, "store")
    fleet.step("a")
    with pytest.raises(BadInputError):
        fleet.step("b", releases=(release("r"), release("r")))
    fleet.wait(1.5)
    assert fleet.states() == {"a": "live", "b": "live", "store": "live"}
    reserved = fleet.reserve("store", "z")
    fleet.wait(1.5)
    assert fleet.states() == {"a": "suspect", "b": "suspect", "store": "live"}
    fleet.end_reservation("store", reserved.reservation_id, 1)
    fleet.wait(1.5)
    assert fleet.states()["store"] == "live"


def test_what_the_coordinator_did_not_hear_while_it_was_paused_does_not_count(
    fleet: Fleet,
) -> None:
    fleet.wait(1.5)
    fleet.now += 3600.0
    fleet.send(Tick())
    assert set(fleet.states().values()) == {"live"}
    fleet.wait(0.5)
    assert set(fleet.states().values()) == {"suspect"}
    fleet.now += 3600.0
    fleet.send(Tick())
    fleet.wait(7.5)
    assert len(fleet.states()) == 3
    fleet.wait(0.5)
    assert fleet.states() == {}


def test_who_is_forgotten_comes_back_and_an_earlier_life_does_not(fleet: Fleet) -> None:
    held = list(held_blocks(fleet.service.state.instances[InstanceId("a")]))
    fleet.wait(10.0, "b", "store")
    for told in (lambda: fleet.beat("a"), lambda: fleet.step("a")):
        with pytest.raises(NotRegisteredError, match="unknown instance; given: a"):
            told()
    assert fleet.locate("xy") == {"b": 1, "store": 0}
    fleet.enter(info("a"), returning=True)
    assert fleet.states()["a"] == "returning"
    fleet.send(blocks_command(fleet, "a", held))
    assert fleet.locate("xy") == {"a": 2, "b": 1, "store": 0}
    fleet.send(requests_command(fleet, "a"))
    assert fleet.states()["a"] == "live"
    fleet.enter(info("a", incarnation=2))
    with pytest.raises(StaleError, match="another incarnation of a"):
        fleet.beat("a", incarnation=1)


def test_who_comes_back_slowly_is_heard_by_each_of_its_words(fleet: Fleet) -> None:
    fleet.enter(info("a"), returning=True)
    fleet.wait(1.5, "b", "store")
    fleet.send(blocks_command(fleet, "a", []))
    fleet.wait(1.5, "b", "store")
    assert fleet.beat("a") == Heard()
    fleet.wait(1.5, "b", "store")
    assert fleet.states()["a"] == "returning"
    fleet.wait(0.5, "b", "store")
    assert fleet.states()["a"] == "suspect"


def test_a_heartbeat_of_another_life_of_the_coordinator_is_refused(fleet: Fleet) -> None:
    old = Heartbeat(
        epoch=Epoch(fleet.service.epoch + 1),
        instance_id=InstanceId("a"),
        incarnation=info("a").incarnation,
    )
    with pytest.raises(NotRegisteredError, match="made under another life of the coordinator"):
        fleet.send(old)


@pytest.mark.parametrize("setting", ["suspect_after_s", "dead_after_s"])
def test_limits_that_are_no_seconds_are_refused(setting: str) -> None:
    with pytest.raises(BadInputError, match=f"{setting} must be a positive number of seconds"):
        Fleet(identity=IDENTITY, check_invariants=True, **{setting: 0.0})


@pytest.mark.parametrize("dead_after_s", [2.0, 1.5])
def test_members_that_would_be_dead_before_they_are_suspects_are_refused(
    dead_after_s: float,
) -> None:
    with pytest.raises(
        BadInputError,
        match=f"dead_after_s must be more than suspect_after_s; given: {dead_after_s}; "
        "allowed: above 2",
    ):
        Fleet(suspect_after_s=2.0, dead_after_s=dead_after_s)
