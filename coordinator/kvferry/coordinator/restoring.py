"""A member that comes back tells what it holds: blocks with their hashes, and running requests.

What it tells is what it will write and serve by, so nothing is believed that contradicts itself: a
command is refused whole, before it has changed anything.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.coordinator.instances import Instance
from kvferry.coordinator.managers.base import GroupManager
from kvferry.coordinator.request_state import RequestState, known_content
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_checks import check_num_hashes, check_num_told
from kvferry.proto.errors import BadInputError, StaleError
from kvferry.proto.ids import BlockHash, BlockId, GroupedHash, pack_group
from kvferry.proto.messages import Done
from kvferry.proto.restore_messages import (
    MAX_RESTORED_BLOCKS,
    RestoreBlocks,
    RestoredRequest,
    RestoreRequests,
)
from kvferry.proto.shared_chain import block_keys


def restore_blocks(instance: Instance, command: RestoreBlocks) -> Done:
    """Make the blocks findable; the pool will reuse them in this order.

    Raises:
        StaleError: a store that holds blocks from before a reset.
        BadInputError: no such group, too many blocks, not one hash of the scheme's size for each,
            or a block that is no block of the pool, was told before, or has an owner.

    """
    if command.num_resets < instance.num_resets:
        raise StaleError(
            "stored before a reset", given=command.num_resets, allowed=instance.num_resets
        )
    groups, pool = instance.manager.groups, instance.manager.pool
    if not 0 <= command.group_id < len(groups):
        raise BadInputError(
            f"{instance.info.instance_id} has no such group",
            given=command.group_id,
            allowed=f"0 to {len(groups) - 1}",
        )
    hashes, block_ids = command.hashes, command.block_ids
    if len(hashes) != len(block_ids) or len(block_ids) > MAX_RESTORED_BLOCKS:
        raise BadInputError(
            "blocks and hashes that cannot be told in one call",
            given={"hashes": len(hashes), "blocks": len(block_ids)},
            allowed=f"as many of both, at most {MAX_RESTORED_BLOCKS}",
        )
    if not block_ids:
        return Done(changed=False)
    _require_sizes(instance, hashes)
    _require_blocks(instance, block_ids)
    if len(set(block_ids)) != len(block_ids) or not pool.are_blank(block_ids):
        raise BadInputError(
            f"{instance.info.instance_id} tells a block twice, or one that has an owner"
        )
    group = groups[command.group_id]
    pool.restore(
        hashes,
        block_ids,
        command.group_id,
        block_tokens=group.block_tokens,
        origin=group.origin,
    )
    return Done(changed=True)


def restore_requests(state: ServiceState, instance: Instance, command: RestoreRequests) -> Done:
    """Let the requests run with the blocks they have; with the last ones the instance is live.

    Raises:
        BadInputError: a request that is known already, counts that contradict each other, a table
            that ends before what is computed or names what is no block of the pool, a block that is
            not completely written and not a request's own, or one that holds something else.

    """
    _check_requests(instance, command.requests)
    for told in command.requests:
        request = RequestState(
            request_id=told.request_id,
            num_tokens=told.num_tokens,
            hashes=list(told.hashes),
            num_computed_tokens=told.num_computed_tokens,
            content=known_content(told.content),
        )
        instance.manager.restore(request, told.block_ids)
        instance.requests[told.request_id] = request
        instance.accounts.uncounted(told.request_id)
    if command.is_last:
        instance.returning_as = None
        state.counters["returns"] += 1
        state.note(
            "instance_returned",
            f"{instance.info.instance_id}: {instance.manager.pool.num_cached_blocks} blocks, "
            f"{len(instance.requests)} running requests",
        )
    return Done(changed=True)


class _Claim(NamedTuple):
    """A block of a request's table; `key` is None where it is not completely written."""

    block: BlockId
    key: GroupedHash | None


def _check_requests(instance: Instance, requests: tuple[RestoredRequest, ...]) -> None:
    pool, known = instance.manager.pool, set(instance.requests)
    keys: dict[BlockId, GroupedHash | None] = {}
    for told in requests:
        if told.request_id in known:
            raise BadInputError("a request is told twice", given=told.request_id)
        known.add(told.request_id)
        _check_counts(instance, told)
        own: set[BlockId] = set()
        for block, key in _claims(instance, told):
            holds = keys[block] if block in keys else pool.key_of(block)
            is_new = holds is None and block not in keys and not pool.ref_count(block)
            is_shared = holds is not None and holds == key
            if block in own or not (is_new or is_shared):
                raise BadInputError(
                    f"request {told.request_id} claims a block that it cannot have",
                    given=block,
                    allowed="one of its own, or a written one with the same hash",
                )
            own.add(block)
            keys[block] = key


def _check_counts(instance: Instance, told: RestoredRequest) -> None:
    who = f"request {told.request_id}"
    if len(told.block_ids) != len(instance.manager.groups):
        raise BadInputError(
            f"{who}: one table per group is needed",
            given=len(told.block_ids),
            allowed=len(instance.manager.groups),
        )
    slots = min(len(table) for table in told.block_ids) * instance.block_tokens
    limit = min(slots, told.num_tokens)
    if not 0 <= told.num_computed_tokens <= limit:
        raise BadInputError(
            f"{who}: num_computed_tokens",
            given=told.num_computed_tokens,
            allowed=f"0 to {limit} (slots {slots}, tokens {told.num_tokens})",
        )
    check_num_hashes(instance, who, len(told.hashes), told.num_tokens)
    _require_sizes(instance, told.hashes)
    if told.content is not None:
        check_num_told(who, len(told.content.tokens), told.num_tokens)


def _claims(instance: Instance, told: RestoredRequest) -> Iterator[_Claim]:
    keys = block_keys(told.hashes, instance.hashes_per_block)
    for group, table in zip(instance.manager.groups, told.block_ids, strict=True):
        yield from _claims_of_group(instance, group, table, told.num_computed_tokens, keys)


def _claims_of_group(
    instance: Instance,
    group: GroupManager,
    table: tuple[BlockId, ...],
    num_computed_tokens: int,
    hashes: tuple[BlockHash, ...],
) -> Iterator[_Claim]:
    """Yield what a request claims of a group.

    Raises:
        BadInputError: a table that names no block where one is needed.

    """
    first = group.num_skipped_blocks(num_computed_tokens)
    _require_blocks(instance, table[first:])
    num_written = num_computed_tokens // group.block_tokens
    for position, block in enumerate(table[first:], first):
        is_written = position < num_written
        yield _Claim(block, pack_group(hashes[position], group.group_id) if is_written else None)


def _require_sizes(instance: Instance, hashes: Sequence[BlockHash]) -> None:
    sizes, size = set(map(len, hashes)), len(instance.info.scheme.none_hash)
    if not sizes <= {size}:
        raise BadInputError(
            "hashes of another size than the scheme's, in bytes", given=sorted(sizes), allowed=size
        )


def _require_blocks(instance: Instance, block_ids: Sequence[BlockId]) -> None:
    if block_ids and not (min(block_ids) > 0 and max(block_ids) < instance.info.num_blocks):
        raise BadInputError(
            f"{instance.info.instance_id} has no such block",
            given=[min(block_ids), max(block_ids)],
            allowed=f"1 to {instance.info.num_blocks - 1}",
        )
