"""Members that come back after a restart: they go on as before, and contradictions are refused."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.coordinator.fleet import (
    HYBRID,
    Fleet,
    admit,
    chain,
    new_blocks,
    release,
    runs,
    wrote,
)
from tests.unit.coordinator.returning import (
    blocks_command,
    come_back,
    held_blocks,
    requests_command,
    restored,
)

from kvferry.coordinator.instances import Instance
from kvferry.coordinator.pool_events import Stored
from kvferry.proto.errors import (
    BadInputError,
    KvferryError,
    MismatchError,
    NotRegisteredError,
    RestoringError,
    StaleError,
)
from kvferry.proto.ids import BlockId, GroupId, Incarnation, InstanceId, RequestId
from kvferry.proto.messages import Command, Done, Registered
from kvferry.proto.restore_messages import MAX_RESTORED_BLOCKS, RestoredRequest
from kvferry.proto.step_messages import RequestContent


@pytest.fixture
def fleet() -> Fleet:
    """An instance with two requests that share the first of their blocks, and a peer."""
    made = Fleet(tells_pool_events=True)
    made.register("a", num_blocks=10)
    made.register("b", num_blocks=10)
    made.cache("a", "pq")
    made.compute("a", admit("r1", "xy", allow_remote=False))
    made.compute("a", admit("r2", "xz", allow_remote=False))
    return made


def at(fleet: Fleet, name: str) -> Instance:
    return fleet.service.state.instances[InstanceId(name)]


def back(fleet: Fleet, *names: str) -> None:
    """Restart the coordinator and let instances tell everything."""
    before = fleet.restart()
    for name in names:
        for command in come_back(fleet, before, name):
            fleet.send(command)


def returning(fleet: Fleet, name: str = "a") -> Instance:
    """Restart the coordinator and register an instance; return what it was."""
    known = at(fleet, name)
    fleet.restart()
    fleet.enter(known.info, returning=True)
    return known


def test_requests_go_on_with_the_blocks_they_had(fleet: Fleet) -> None:
    before = at(fleet, "a")
    back(fleet, "a")
    assert at(fleet, "a").tables(RequestId("r1")) == before.tables(RequestId("r1"))
    assert [at(fleet, "a").manager.pool.ref_count(BlockId(b)) for b in range(10)] == [
        before.manager.pool.ref_count(BlockId(b)) for b in range(10)
    ]
    (scheduled,) = fleet.step(
        "a", progress=(wrote("r1", 9, 13, chain("xyg")[2:]),), running=(runs("r1", 13),)
    ).scheduled
    assert (scheduled.num_computed_tokens, scheduled.granted_tokens) == (9, 13)
    assert len(new_blocks(scheduled)) == 1
    fleet.step("a", releases=(release("r1"), release("r2")))
    assert fleet.num_free("a") == 9
    assert fleet.locate("xy") == {"a": 2}


def test_what_is_cached_is_found_again_and_reused_in_the_same_order(fleet: Fleet) -> None:
    fleet.step("a", releases=(release("r2"),))
    free = fleet.free_order("a")
    back(fleet, "a", "b")
    assert fleet.locate("pq") == {"a": 2, "b": 0}
    assert fleet.locate("xz") == {"a": 2, "b": 0}
    assert fleet.free_order("a") == free


def test_blocks_that_hold_nothing_are_reused_before_those_that_do(fleet: Fleet) -> None:
    known = returning(fleet)
    fleet.send(blocks_command(fleet, "a", [(GroupId(0), chain("k")[0], BlockId(4))]))
    fleet.send(requests_command(fleet, "a"))
    assert fleet.free_order("a") == [1, 2, 3, 5, 6, 7, 8, 9, 4]
    assert known.info.num_blocks == 10
    scheduled = fleet.admit("a", admit("r3", "mnopqrst", extra_tokens=0))
    assert new_blocks(scheduled) == (1, 2, 3, 5, 6, 7, 8, 9)
    assert fleet.locate("k") == {"a": 1}


def test_until_all_is_told_steps_and_reservations_are_refused_and_the_rest_is_found(
    fleet: Fleet,
) -> None:
    known = returning(fleet)
    told = [held for held in held_blocks(known) if held[1] in chain("pq")]
    fleet.send(blocks_command(fleet, "a", told))
    assert fleet.locate("pq") == {"a": 2}
    assert [one.state for one in fleet.describe().instances] == ["returning"]
    leased = fleet.lease("pq", at="a")
    assert leased.num_hashes == 2
    for refused in (lambda: fleet.step("a"), lambda: fleet.reserve("a", "k")):
        with pytest.raises(RestoringError, match="given: a") as caught:
            refused()
        assert caught.value.retryable
    fleet.send(requests_command(fleet, "a"))
    assert [one.state for one in fleet.describe().instances] == ["live"]
    assert fleet.describe().counters["returns"] == 1
    assert fleet.effects[-1].detail == "a: 2 blocks, 0 running requests"
    assert fleet.num_free("a") == 7
    fleet.step("a")


def test_a_load_may_come_from_an_instance_that_has_not_told_everything(fleet: Fleet) -> None:
    known, peer = at(fleet, "a"), at(fleet, "b")
    fleet.restart()
    fleet.enter(known.info, returning=True)
    fleet.enter(peer.info)
    told = [held for held in held_blocks(known) if held[1] in chain("pq")]
    fleet.send(blocks_command(fleet, "a", told))
    load = fleet.admit_load("b", admit("r9", "pq"))
    assert load.source.instance_id == "a"


def test_what_was_promised_by_an_earlier_life_is_gone(fleet: Fleet) -> None:
    leased = fleet.lease("pq", at="a")
    fleet.open_handoff("r1", "a", "b")
    step = fleet.make_step("a")
    back(fleet, "a", "b")
    assert (fleet.describe().num_leases, fleet.describe().num_handoffs) == (0, 0)
    assert leased.lease_id == "lease-1-1"
    assert fleet.lease("pq", at="a").lease_id == "lease-2-1"
    with pytest.raises(NotRegisteredError, match="given: 1; allowed: 2"):
        fleet.send(step)


def test_who_is_no_member_must_come_back_and_who_lives_another_life_cannot(fleet: Fleet) -> None:
    known = at(fleet, "a")
    fleet.restart()
    with pytest.raises(NotRegisteredError, match="given: a"):
        fleet.send(blocks_command(fleet, "a", []))
    fleet.enter(replace(known.info, incarnation=Incarnation(2)))
    with pytest.raises(StaleError, match="given: 1; allowed: 2") as caught:
        fleet.enter(known.info, returning=True)
    assert not isinstance(caught.value, NotRegisteredError)


def test_who_comes_back_again_starts_over(fleet: Fleet) -> None:
    known = returning(fleet)
    fleet.send(blocks_command(fleet, "a", list(held_blocks(known))))
    registered = fleet.enter(known.info, returning=True)
    assert registered == Registered(epoch=fleet.service.epoch, wants_content=True)
    assert fleet.locate("pq") == {"a": 0}
    fleet.send(blocks_command(fleet, "a", list(held_blocks(known))))
    assert fleet.locate("pq") == {"a": 2}


def test_what_was_told_with_another_registration_comes_too_late(fleet: Fleet) -> None:
    known = returning(fleet)
    late: list[Command] = [
        blocks_command(fleet, "a", list(held_blocks(known))),
        requests_command(fleet, "a", [restored(known, RequestId("r1"))]),
    ]
    fleet.enter(known.info, returning=True)
    for command in late:
        with pytest.raises(NotRegisteredError, match=r"given: call-\d+; allowed: call-\d+"):
            fleet.send(command)
    assert fleet.locate("xy") == {"a": 0}
    assert at(fleet, "a").returning_as is not None


def test_another_process_cannot_come_back_as_a_member(fleet: Fleet) -> None:
    with pytest.raises(MismatchError, match="another live process"):
        fleet.enter(replace(at(fleet, "a").info, num_blocks=20), returning=True)


def test_only_who_comes_back_can_tell_what_it_holds(fleet: Fleet) -> None:
    for command in (blocks_command(fleet, "a", []), requests_command(fleet, "a")):
        with pytest.raises(NotRegisteredError, match="not a registration by which"):
            fleet.send(command)


def test_a_repeat_of_what_was_told_changes_nothing(fleet: Fleet) -> None:
    known = returning(fleet)
    for command in (
        blocks_command(fleet, "a", list(held_blocks(known))),
        requests_command(fleet, "a", [restored(known, RequestId("r1"))], is_last=True),
    ):
        assert [fleet.send(command), fleet.send(command)] == [Done(changed=True)] * 2
    assert at(fleet, "a").num_requests == 1


def test_written_blocks_that_nobody_told_become_findable_with_their_request(fleet: Fleet) -> None:
    known = returning(fleet)
    told = replace(
        restored(known, RequestId("r1")),
        content=RequestContent(tokens=tuple(range(9))),
    )
    fleet.service.take_pool_events()
    fleet.send(requests_command(fleet, "a", [told, restored(known, RequestId("r2"))]))
    assert fleet.locate("xy") == {"a": 2}
    assert fleet.locate("xz") == {"a": 2}
    (_, (first, second)), *_ = fleet.service.take_pool_events()
    assert isinstance(first, Stored)
    assert first.content is not None
    assert (first.hashes, first.content.tokens) == (chain("xy"), tuple(range(8)))
    assert isinstance(second, Stored)
    assert (second.hashes, second.parent) == (chain("xz")[1:], chain("xz")[0])


def test_a_table_may_name_blocks_that_were_given_back_behind_the_window() -> None:
    fleet = Fleet(identity=HYBRID)
    fleet.register("a", num_blocks=40)
    fleet.compute("a", admit("r1", "vwxyz"))
    fleet.step("a", progress=(wrote("r1", 21, 25, chain("vwxyzg")[5:]),), running=(runs("r1", 25),))
    known = at(fleet, "a")
    told = restored(known, RequestId("r1"))
    full, window, chunk, state = told.block_ids
    assert window[:3] == chunk[:3] == state[:3] == (0, 0, 0)
    other = full[0]
    back(fleet, "a")
    tables = at(fleet, "a").tables(RequestId("r1"))
    assert tables == told.block_ids
    returning(fleet)
    stale = replace(told, block_ids=(full, (other, other, *window[2:]), chunk, state))
    fleet.send(requests_command(fleet, "a", [stale]))
    assert at(fleet, "a").tables(RequestId("r1")) == told.block_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_id": GroupId(1)}, "no such group; given: 1; allowed: 0 to 0"),
        ({"hashes": chain("pqr")}, "hashes=3, blocks=2; allowed: as many of both, at most 65536"),
        (
            {"hashes": (b"", chain("p")[0])},
            r"hashes of another size .*given: \[0, 32\]; allowed: 32",
        ),
        ({"block_ids": (BlockId(0), BlockId(2))}, r"no such block; given: \[0, 2\]"),
        ({"block_ids": (BlockId(1), BlockId(10))}, r"given: \[1, 10\]; allowed: 1 to 9"),
        ({"block_ids": (BlockId(2), BlockId(2))}, "a tells a block twice"),
        ({"block_ids": (BlockId(2), BlockId(5))}, "a tells a block twice, or one that has an"),
    ],
)
def test_blocks_that_cannot_be_are_refused_and_change_nothing(
    fleet: Fleet, changes: dict[str, Any], message: str
) -> None:
    returning(fleet)
    fleet.send(blocks_command(fleet, "a", [(GroupId(0), chain("k")[0], BlockId(5))]))
    held = [(GroupId(0), found, BlockId(1 + i)) for i, found in enumerate(chain("pq"))]
    with pytest.raises(BadInputError, match=message):
        fleet.send(blocks_command(fleet, "a", held, **changes))
    assert fleet.locate("pq") == {"a": 0}
    assert fleet.free_order("a") == [1, 2, 3, 4, 6, 7, 8, 9, 5]


def test_more_blocks_than_one_call_may_tell_are_refused(fleet: Fleet) -> None:
    returning(fleet)
    number = MAX_RESTORED_BLOCKS + 1
    with pytest.raises(BadInputError, match="at most 65536"):
        fleet.send(
            blocks_command(
                fleet, "a", [], hashes=chain("p") * number, block_ids=(BlockId(1),) * number
            )
        )


X1, X2 = chain("xy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": RequestId("r2")}, "a request is told twice; given: r2"),
        ({"block_ids": ()}, "one table per group is needed; given: 0; allowed: 1"),
        ({"num_computed_tokens": 13}, "given: 13; allowed: 0 to 9"),
        ({"num_computed_tokens": -1}, "given: -1; allowed: 0 to 9"),
        ({"block_ids": ((1, 2),)}, "given: 9; allowed: 0 to 8"),
        ({"hashes": (X1,)}, "one hash per full hash block is needed"),
        ({"hashes": (X1, b"")}, r"hashes of another size .*given: \[0, 32\]; allowed: 32"),
        ({"content": RequestContent(tokens=(1,))}, "every token must be told"),
        ({"block_ids": ((1, 0, 3),)}, r"no such block; given: \[0, 3\]; allowed: 1 to 9"),
        ({"block_ids": ((1, 2, 10),)}, r"no such block; given: \[1, 10\]"),
        ({"block_ids": ((1, 2, 2),)}, "claims a block that it cannot have; given: 2"),
        # Its last block is written by another request, holds a prefix, or is full elsewhere.
        ({"block_ids": ((1, 2, 7),)}, "given: 7; allowed: one of its own, or a written one"),
        ({"block_ids": ((1, 2, 9),)}, "claims a block that it cannot have; given: 9"),
        ({"block_ids": ((1, 6, 3),)}, "claims a block that it cannot have; given: 6"),
        ({"block_ids": ((1, 9, 3),)}, "claims a block that it cannot have; given: 9"),
        ({"block_ids": ((1, 7, 3),)}, "claims a block that it cannot have; given: 7"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_requests_that_cannot_be_are_refused_and_change_nothing(
    fleet: Fleet, changes: dict[str, Any], message: str, together: bool
) -> None:
    returning(fleet)
    fleet.send(blocks_command(fleet, "a", [(GroupId(0), chain("k")[0], BlockId(9))]))
    good = _request("r2", chain("xz"), (1, 6, 7))
    bad = replace(_request("r1", (X1, X2), (1, 2, 3)), **changes)
    if not together:
        fleet.send(requests_command(fleet, "a", [good], is_last=False))
    told = [good, bad] if together else [bad]
    free = fleet.free_order("a")
    with pytest.raises(KvferryError, match=message) as caught:
        fleet.send(requests_command(fleet, "a", told))
    assert isinstance(caught.value, BadInputError)
    assert fleet.free_order("a") == free
    assert set(at(fleet, "a").requests) == ({RequestId("r2")} if not together else set())
    assert at(fleet, "a").returning_as is not None


def _request(name: str, hashes: Any, table: tuple[int, ...]) -> RestoredRequest:
    return RestoredRequest(
        request_id=RequestId(name),
        num_tokens=9,
        num_computed_tokens=9,
        hashes=hashes,
        block_ids=(tuple(map(BlockId, table)),),
    )


def test_a_store_that_lacks_a_reset_is_refused_until_it_has_dropped_what_it_holds() -> None:
    fleet = Fleet()
    fleet.register("store", role="store", max_model_len=0)
    reserved = fleet.reserve("store", "xy")
    assert fleet.end_reservation("store", reserved.reservation_id, 2)
    known = at(fleet, "store")
    held = list(held_blocks(known))
    fleet.reset()
    fleet.restart()
    assert fleet.enter(known.info, returning=True).num_resets == 1
    with pytest.raises(StaleError, match="stored before a reset; given: 0; allowed: 1"):
        fleet.send(blocks_command(fleet, "store", held))
    fleet.send(blocks_command(fleet, "store", held[:1], num_resets=1))
    assert fleet.reset() == 1
    with pytest.raises(StaleError, match="given: 1; allowed: 2"):
        fleet.send(blocks_command(fleet, "store", held[1:], num_resets=1))
    fleet.send(requests_command(fleet, "store"))
    assert fleet.locate("xy") == {"store": 0}
    assert fleet.reserve("store", "xy").num_resets == 2


def test_a_store_that_was_away_during_a_reset_learns_of_it_when_it_comes_back() -> None:
    fleet = Fleet()
    fleet.register("store", role="store", max_model_len=0)
    known = at(fleet, "store")
    fleet.restart()
    assert fleet.reset() == 0
    assert fleet.service.resets() == {fleet.identity.digest(): 1}
    assert fleet.enter(known.info, returning=True).num_resets == 1
