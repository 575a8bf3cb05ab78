"""The receiving side of a Take: reserve blocks, pull what is missing, say how much is here now."""

from collections.abc import Callable, Sequence

from kvferry.proto.errors import (
    BadInputError,
    DeadlineError,
    KvferryError,
    MismatchError,
    NotFoundError,
    class_named,
)
from kvferry.proto.ids import BlockId, runs_of_reserved
from kvferry.proto.layout import Layout
from kvferry.proto.placement import KvShape, holdings
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.pull import CANCELLED, PullOutcome
from kvferry.worker.reservations import Reserver, reserving
from kvferry.worker.residency import Residency
from kvferry.worker.take_wire import TakeAsk

# More than any engine has; a plan looks at each of them.
MAX_SOURCE_RANKS = 4096

Pull = Callable[[Sequence[GroupLoad], int], PullOutcome]
"""Fills the loads in order, until one fails; after so many resets what came whole is resident."""


def require_takeable(source: Source, own: Layout, shape: KvShape) -> None:
    """Refuse a source whose ranks cannot hold the blocks of a store in parts.

    Raises:
        BadInputError: too many ranks, or another number of addresses than of ranks.
        MismatchError: its (virtual) blocks do not cover what a block here does.
        ConfigError: stages or head shards that do not fit the model.
    """
    num_ranks, num_addresses = source.layout.num_ranks, len(source.rank_addresses)
    if num_addresses != num_ranks or num_ranks > MAX_SOURCE_RANKS:
        raise BadInputError(
            "a source must tell the address of each of its ranks",
            given={"rank_addresses": num_addresses, "num_ranks": num_ranks},
            allowed=f"as many as ranks, at most {MAX_SOURCE_RANKS}",
        )
    tokens = source.layout.virtual_block_tokens
    if tokens != own.virtual_block_tokens:
        raise MismatchError(
            "a store takes blocks of its own size only",
            given={"virtual_block_tokens": tokens},
            allowed={"virtual_block_tokens": own.virtual_block_tokens},
        )
    holdings(source.layout, shape)


def take_blocks(ask: TakeAsk, *, pull: Pull, residency: Residency, reserver: Reserver) -> int:
    """Pull the asked blocks that are not here into reserved ones; return how many are here now.

    The count is the length of a prefix of the hashes. Whatever ends the pull, blocks that came
    whole and in order are kept and the reservation is ended. What the source lacks is no error.

    Raises:
        DeadlineError: the caller left, or its deadline has passed.
        KvferryError: why the source gave less, what the reserver raised, or as the pull.
    """
    with reserving(reserver, residency, ask.group_id, ask.hashes) as reservation:
        runs = list(runs_of_reserved(reservation.block_ids))
        loads = [_load(ask, run, reservation.block_ids) for run in runs]
        outcome = pull(loads, reservation.num_resets)
        reservation.num_written = len(ask.hashes)
        for run, arrived in zip(runs, outcome.num_blocks_of_run, strict=True):
            if arrived < len(run):
                reservation.num_written = run.start + arrived
                break
        _require_nothing_but_lack(outcome)
    return reservation.num_written


def _load(ask: TakeAsk, run: range, block_ids: Sequence[BlockId | None]) -> GroupLoad:
    hashes = ask.hashes[run.start : run.stop]
    return GroupLoad(
        group_id=ask.group_id,
        first_block=ask.first_block + run.start,
        block_ids=[block for block in block_ids[run.start : run.stop] if block is not None],
        hashes=hashes,
        first_source_block=ask.first_block + run.start,
        source_hashes=hashes,
    )


def _require_nothing_but_lack(outcome: PullOutcome) -> None:
    if outcome.error is None or outcome.error_type == NotFoundError.__name__:
        return
    if outcome.error_type == CANCELLED:
        raise DeadlineError("the caller of a take has left, or its deadline has passed")
    kind = class_named(outcome.error_type or "") or KvferryError
    raise kind(f"the source of a take: {outcome.error}")
