"""What an engine tells the coordinator of a load that has ended."""

import logging

from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.serving.scheduler import LoadOrder
from kvferry.proto.step_messages import LoadFailure, LoadResult
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.pull import PullOutcome

log = logging.getLogger(__name__)


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
