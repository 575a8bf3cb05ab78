"""What is moved into which blocks, the receiving loop, and what a pull reports at its end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupId
from kvferry.proto.reshard import Transfer
from kvferry.worker.frames import Frame, Header
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.selection import BlockTable
from kvferry.worker.transfer_session import PullSession

CANCELLED = "Cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Blocks of one group that move together: the content of `hashes[i]` and `block_ids[i]`."""

    group_id: GroupId
    hashes: Sequence[BlockHash]
    block_ids: Sequence[BlockId]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOutcome:
    """How a pull ended; its writer is closed.

    `num_blocks_of_run`: for each run asked for, the length of its prefix that is verified and in
    place. `num_bytes`: bytes put in place, also those after the prefixes. `error` is None when
    everything asked for is there; `error_type` is the class name of the error otherwise
    (`CANCELLED` when the caller gave up). `failed_block`: which block the error is about, counted
    over all runs.
    """

    num_blocks_of_run: tuple[int, ...]
    num_bytes: int
    num_checksum_failures: int = 0
    error: str | None = None
    error_type: str | None = None
    failed_block: int = 0


def failed_pull(failure: Exception, num_runs: int) -> PullOutcome:
    """Return the outcome of a pull of so many runs that put nothing in place."""
    return PullOutcome(
        num_blocks_of_run=(0,) * num_runs,
        num_bytes=0,
        error=str(failure),
        error_type=type(failure).__name__,
    )


def merge_outcomes(outcomes: Sequence[PullOutcome]) -> PullOutcome:
    """Return the outcome of one pull by several ranks: a block counts where all of them have it.

    Of several errors, that of the first rank that was not told to stop. It is about the first block
    that this rank lacks; one that was told to stop may have less.
    """
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    failed.sort(key=lambda outcome: outcome.error_type == CANCELLED)
    return PullOutcome(
        num_blocks_of_run=tuple(
            min(counts) for counts in zip(*(o.num_blocks_of_run for o in outcomes), strict=True)
        ),
        num_bytes=sum(outcome.num_bytes for outcome in outcomes),
        num_checksum_failures=sum(outcome.num_checksum_failures for outcome in outcomes),
        error=failed[0].error if failed else None,
        error_type=failed[0].error_type if failed else None,
        failed_block=sum(failed[0].num_blocks_of_run) if failed else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """One transfer of a plan: the part of a source rank's blocks that a destination rank takes.

    `hashes` are consecutive blocks of the source rank, the first
    of them after `skipped_source_tokens` of its local tokens. `table` has the destination rank's
    blocks, the first of them after `skipped_tokens` of its own.
    """

    group_id: GroupId
    hashes: Sequence[BlockHash]
    transfer: Transfer
    table: BlockTable
    skipped_source_tokens: int = 0
    skipped_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """How the pull of a run ended; its writer is closed.

    `num_in_place`: so many of a `BlockRun`'s first blocks, or of a `PartRun`'s first tokens, are
    verified and in place. The rest is as in `PullOutcome`.
    """

    num_in_place: int
    num_bytes: int
    num_checksum_failures: int = 0
    error: str | None = None
    error_type: str | None = None


def receive(
    messages: Iterable[Header | Frame], session: PullSession, place: Callable[[Frame], None]
) -> None:
    """Run a session over a source's messages until it is finished.

    `place` puts an admitted frame's bytes where they belong, and returns when they are there. Stops
    reading as soon as everything announced is in place, so that a late end is no failure.

    Raises:
        TransferError: what the session refused, or the messages ended early.
    """
    for message in messages:
        if isinstance(message, Header):
            session.open(message)
        else:
            session.admit(message)
            place(message)
            session.placed(message.segments)
        if session.is_finished:
            return
    session.close()


def require_destinations(runs: Sequence[BlockRun | GroupLoad], num_blocks: int) -> None:
    """Refuse runs, or loads, that do not have one block per hash.

    Raises:
        BadInputError: another number of blocks than of hashes, a block twice (also in two runs: a
            block is of one group at a time), the null block, or an id that is not below
            `num_blocks`.
    """
    for run in runs:
        if len(run.block_ids) != len(run.hashes):
            raise BadInputError(
                "every hash needs a destination block",
                given=len(run.block_ids),
                allowed=len(run.hashes),
            )
    block_ids = [block_id for run in runs for block_id in run.block_ids]
    wrong = [block_id for block_id in block_ids if not NULL_BLOCK < block_id < num_blocks]
    if wrong:
        raise BadInputError(
            "no such destination blocks", given=wrong, allowed=f"1 to {num_blocks - 1}"
        )
    if len(set(block_ids)) != len(block_ids):
        raise BadInputError("a destination block is named twice", given=block_ids)
