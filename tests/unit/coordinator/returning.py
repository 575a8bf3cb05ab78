"""Members that come back to a coordinator that was restarted, and tell what they hold."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from tests.unit.coordinator.fleet import Fleet

from kvferry.coordinator.instances import Instance
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.ids import BlockHash, BlockId, GroupId, InstanceId, RequestId, unpack_group
from kvferry.proto.messages import Command
from kvferry.proto.restore_messages import RestoreBlocks, RestoredRequest, RestoreRequests

Held = tuple[GroupId, BlockHash, BlockId]


def held_blocks(instance: Instance) -> Iterator[Held]:
    """Yield what an instance's blocks hold, those first that its pool would reuse first."""
    pool = instance.manager.pool
    free = list(pool.free_order())
    used = [BlockId(block) for block in range(1, pool.num_blocks) if BlockId(block) not in free]
    for block in (*free, *used):
        for key in pool.keys_of(block):
            block_hash, group_id = unpack_group(key)
            yield group_id, block_hash, block


def blocks_command(fleet: Fleet, name: str, held: Sequence[Held], **changes: Any) -> RestoreBlocks:
    """Tell blocks of one group."""
    instance = fleet.service.state.instances.get(InstanceId(name))
    values: dict[str, Any] = {
        "call_id": fleet.call_id(),
        "epoch": fleet.service.epoch,
        "instance_id": InstanceId(name),
        "incarnation": instance.info.incarnation if instance else 1,
        "registration": (instance.returning_as if instance else None) or "none",
        "group_id": held[0][0] if held else GroupId(0),
        "hashes": tuple(block_hash for _, block_hash, _ in held),
        "block_ids": tuple(block for _, _, block in held),
    }
    return RestoreBlocks(**(values | changes))


def requests_command(
    fleet: Fleet, name: str, requests: Iterable[RestoredRequest] = (), **changes: Any
) -> RestoreRequests:
    """Tell running requests."""
    instance = fleet.service.state.instances.get(InstanceId(name))
    values: dict[str, Any] = {
        "call_id": fleet.call_id(),
        "epoch": fleet.service.epoch,
        "instance_id": InstanceId(name),
        "incarnation": instance.info.incarnation if instance else 1,
        "registration": (instance.returning_as if instance else None) or "none",
        "requests": tuple(requests),
    }
    return RestoreRequests(**(values | changes))


def restored(instance: Instance, request_id: RequestId) -> RestoredRequest:
    """Return a request as its engine would tell of it."""
    request = instance.requests[request_id]
    return RestoredRequest(
        request_id=request_id,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        hashes=tuple(request.hashes),
        block_ids=instance.tables(request_id),
    )


def come_back(fleet: Fleet, before: CoordinatorService, name: str) -> Iterator[Command]:
    """Register again, then yield the commands that tell what an instance holds, to be sent."""
    known = before.state.instances[InstanceId(name)]
    registered = fleet.enter(known.info, returning=True)
    for _, run in groupby(held_blocks(known), key=itemgetter(0)):
        held = list(run)
        # Two commands, as for a large pool.
        for part in (held[: len(held) // 2], held[len(held) // 2 :]):
            yield blocks_command(fleet, name, part, num_resets=registered.num_resets)
    running = [request_id for request_id in known.requests if known.is_running(request_id)]
    for request_id in running:
        told = restored(known, request_id)
        yield requests_command(fleet, name, [told], is_last=request_id == running[-1])
    if not running:
        yield requests_command(fleet, name)


def require_same(before: CoordinatorService, after: CoordinatorService, name: str) -> None:
    """An instance that has told everything runs what it ran, and is found to hold what it held."""
    known, now = (service.state.instances[InstanceId(name)] for service in (before, after))
    running = [request_id for request_id in known.requests if known.is_running(request_id)]
    assert list(now.requests) == running
    for request_id in running:
        request, again = known.requests[request_id], now.requests[request_id]
        assert again.num_tokens == request.num_tokens
        assert again.num_computed_tokens == request.num_computed_tokens
        assert again.hashes == request.hashes
        for table, told in zip(now.tables(request_id), known.tables(request_id), strict=True):
            # What is of no use any more may have been given back since.
            assert all(block in (0, was) for block, was in zip(table, told, strict=True))
    written = {
        (block, group_id)
        for request_id in running
        for group_id, table in enumerate(now.tables(request_id))
        for block in table[: now.requests[request_id].num_computed_tokens // now.block_tokens]
    }
    found, held = set(held_blocks(now)), set(held_blocks(known))
    assert held <= found
    # A written block that was forgotten (its worker did not have it) is told to be there.
    assert {(block, group_id) for group_id, _, block in found - held} <= written
