"""What an engine fetches for a load, and what it tells the coordinator when that has ended."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cluster.serving.limits import Limits
from kvferry.proto.ids import NULL_BLOCK, BlockHash, GroupId
from kvferry.proto.step_messages import Load, LoadFailure, LoadResult
from kvferry.worker.group_load import GroupLoad, group_load
from kvferry.worker.pull import PullOutcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Blocks to fetch from a peer, of each group that needs any, beyond `hit_tokens`."""

    load: Load
    loads: tuple[GroupLoad, ...]
    hit_tokens: int


def load_order(
    load: Load, hashes: Sequence[BlockHash], *, block_tokens: int, hash_block_tokens: int
) -> LoadOrder:
    """Return what to fetch for a load.

    Args:
        load: as the coordinator said it.
        hashes: the request's, as far as they are known.
        block_tokens: tokens of a (virtual) block here.
        hash_block_tokens: tokens of one hash.

    Raises:
        ConfigError: as `group_load`.
    """
    loads = []
    for group_id, table in enumerate(load.block_ids):
        # The null blocks, which need nothing, are the first ones.
        first = max(load.num_hit_blocks, table.count(NULL_BLOCK))
        if first < len(table):
            loads.append(
                group_load(
                    hashes,
                    GroupId(group_id),
                    table[first:],
                    first_block=first,
                    block_tokens=block_tokens,
                    source_block_tokens=load.source.layout.virtual_block_tokens,
                    hash_block_tokens=hash_block_tokens,
                )
            )
    return LoadOrder(load=load, loads=tuple(loads), hit_tokens=load.num_hit_blocks * block_tokens)


def load_result(order: LoadOrder, outcome: PullOutcome, limits: Limits) -> LoadResult:
    """Return the result of a load; why something did not come is logged, too."""
    failure = None
    if outcome.error is not None and outcome.error_type is not None:
        load, index = _place(order, outcome.failed_block)
        failure = LoadFailure(
            error_type=outcome.error_type,
            message=outcome.error,
            group_id=load.group_id,
            block=load.first_block + index,
        )
        log.warning(
            "request %s: %d of %d blocks came from %s; it failed at %s of group %d: %s",
            order.load.request_id,
            sum(outcome.num_blocks_of_run),
            sum(len(one.block_ids) for one in order.loads),
            order.load.source.instance_id,
            load.hashes[index].hex(),
            load.group_id,
            outcome.error,
        )
    return LoadResult(
        request_id=order.load.request_id,
        num_computed_tokens=_tokens_in_place(order, outcome, limits),
        failure=failure,
    )


def _tokens_in_place(order: LoadOrder, outcome: PullOutcome, limits: Limits) -> int:
    """Return how many tokens of the prompt a load has left in place, those before it included."""
    if outcome.error is None:
        return len(order.load.block_ids[0]) * limits.block_tokens
    if not limits.takes_partial_loads:
        return order.hit_tokens
    return order.hit_tokens + outcome.num_blocks_of_run[0] * limits.block_tokens


def _place(order: LoadOrder, index: int) -> tuple[GroupLoad, int]:
    """Return in which group's load a block is, counted over all of them, and its index there."""
    for load in order.loads[:-1]:
        if index < len(load.block_ids):
            return load, index
        index -= len(load.block_ids)
    return order.loads[-1], index
