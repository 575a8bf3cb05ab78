"""Every invariant notices when it is broken, and names both sides."""

from collections.abc import Callable

import pytest
from tests.unit.coordinator.fleet import Fleet, admit

from kvferry.coordinator import invariants
from kvferry.coordinator.handoff import HandoffState
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.pool_events import Stored
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockHash, BlockId, GroupId, InstanceId, RequestId


@pytest.fixture
def fleet() -> Fleet:
    """Instance a: blocks 1 (x, findable) and 2 of request r; the rest is free."""
    fleet = Fleet()
    fleet.register("a")
    fleet.register("b")
    fleet.compute("a", admit("r", "x"))
    fleet.lease("x")
    fleet.open_handoff("h", "a", "b")
    invariants.check(fleet.service)
    return fleet


def instance_a(fleet: Fleet) -> Instance:
    return fleet.service.state.instances[InstanceId("a")]


def free_a_used_block(fleet: Fleet) -> None:
    instance_a(fleet).manager.pool._free.prepend([BlockId(2)])


def lose_a_free_block(fleet: Fleet) -> None:
    instance_a(fleet).manager.pool._free.take(1)


def free_the_null_block(fleet: Fleet) -> None:
    instance_a(fleet).manager.pool._free.prepend([BlockId(0)])


def free_twice(fleet: Fleet) -> None:
    instance_a(fleet).manager.pool.free_blocks([BlockId(5)])


def reference_without_owner(fleet: Fleet) -> None:
    instance_a(fleet).manager.pool.touch([BlockId(2)])


def index_without_hash(fleet: Fleet) -> None:
    instance_a(fleet).manager.pool._hashes.carried[1] = None


def share_an_unwritten_block(fleet: Fleet) -> None:
    instance_a(fleet).manager.groups[0]._tables[RequestId("r")].append(BlockId(2))


def find_an_unwritten_block(fleet: Fleet) -> None:
    instance_a(fleet).requests[RequestId("r")].num_computed_tokens = 3


def forget_the_request_only(fleet: Fleet) -> None:
    del instance_a(fleet).requests[RequestId("r")]


def locate_a_strange_key(fleet: Fleet) -> None:
    event = Stored((BlockId(9),), (BlockHash(b"strange"),), GroupId(0))
    fleet.service.state.index.apply(InstanceId("a"), [event])


def forget_a_member(fleet: Fleet) -> None:
    fleet.service.state.index.leave(InstanceId("b"))


def lease_a_gone_instance(fleet: Fleet) -> None:
    lease = fleet.service.state.leases.live()[0]
    instance_a(fleet).manager.pool.free_blocks(lease.block_ids)
    lease.instance_id = InstanceId("gone")


def keep_an_ended_handoff(fleet: Fleet) -> None:
    fleet.service.state.handoffs[RequestId("h")].state = HandoffState.DONE


def ready_without_lease(fleet: Fleet) -> None:
    fleet.service.state.handoffs[RequestId("h")].state = HandoffState.READY


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (free_a_used_block, "free blocks and blocks without reference"),
        (lose_a_free_block, "free blocks and blocks without reference"),
        (free_the_null_block, "free blocks and blocks without reference"),
        (free_twice, "blocks freed twice; given: 1; allowed: 0"),
        (reference_without_owner, "references and their owners"),
        (index_without_hash, "indexed blocks and blocks with a hash"),
        (share_an_unwritten_block, "unwritten block 2 is in 2 tables"),
        (find_an_unwritten_block, "block 1 of request r is findable and not written"),
        (forget_the_request_only, "table of request r"),
        (locate_a_strange_key, "location index and pool"),
        (forget_a_member, "members of the location index"),
        (lease_a_gone_instance, "is on a gone instance"),
        (keep_an_ended_handoff, "handoff of h is live"),
        (ready_without_lease, "has had a lease"),
    ],
)
def test_damage_is_noticed_and_named(
    fleet: Fleet, damage: Callable[[Fleet], None], text: str
) -> None:
    damage(fleet)
    with pytest.raises(InvariantError, match=text):
        invariants.check(fleet.service)


def test_a_checking_service_raises_from_the_next_command(fleet: Fleet) -> None:
    reference_without_owner(fleet)
    with pytest.raises(InvariantError, match="references and their owners"):
        fleet.describe()
