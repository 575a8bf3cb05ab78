"""An instance seen from rank 0: what the engine asks for is done on every rank.

A rank that is gone, or does not answer in time, ends the instance: nobody could tell any more what
it still writes.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvferry.cluster.ports import PendingCall, RankPort
from kvferry.cluster.serving.rank import Rank
from kvferry.cluster.serving.sequence import Run
from kvferry.proto.errors import (
    DeadlineError,
    InstanceDiedError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.ids import BlockHash, BlockId, GroupId, LeaseId, RequestId
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.inventory import InventoryPart
from kvferry.worker.model.runner import SequenceSlice
from kvferry.worker.model.sampling import sample
from kvferry.worker.pull import PullOutcome, failed_pull, merge_outcomes

CALL_TIMEOUT_S = 10.0
CANCEL_POLL_S = 0.05
PULL_GRACE_S = 10.0
"""A pull ends by itself after its timeout; a rank that is not back so much later has stopped."""


class AllRanks:
    """The `BlockMover` and the `Forward` of an engine whose instance has one rank or several.

    Args:
        own: rank 0.
        others: the other ranks, in order.
        pass_timeout_s: how long the others may take longer for a pass than rank 0.
    """

    def __init__(self, own: Rank, others: Sequence[RankPort], *, pass_timeout_s: float) -> None:
        self._own = own
        self._others = others
        self._pass_timeout_s = pass_timeout_s
        self._pull_numbers = itertools.count(1)
        self._lost: KvferryError | None = None

    def forward(self, runs: tuple[Run, ...]) -> dict[RequestId, int]:
        """Run slices through the model; return the chosen token of each run that samples.

        Raises:
            KvferryError: a rank refused, is gone, or did not answer in time.
        """
        slices = [
            SequenceSlice(
                token_ids=run.token_ids,
                start_position=run.start_position,
                block_tables=run.block_tables,
            )
            for run in runs
        ]
        calls = self._begin("forward", slices)
        logits = self._own.forward(slices)
        assert logits is not None  # they are rank 0's
        self._wait(calls, self._pass_timeout_s)
        return {
            run.request.request_id: sample(
                row, run.request.sampling, position=run.start_position + len(run.token_ids)
            )
            for run, row in zip(runs, logits, strict=True)
            if run.sample
        }

    def written(self, group_id: GroupId, pairs: Iterable[tuple[BlockHash, BlockId]]) -> None:
        """See `BlockMover.written`; on every rank when this returns."""
        known = tuple(pairs)
        calls = self._begin("written", group_id, known)
        self._own.written(group_id, known)
        self._wait(calls, CALL_TIMEOUT_S)

    def reused(self, block_ids: tuple[BlockId, ...]) -> None:
        """See `BlockMover.reused`; on every rank when this returns."""
        if not block_ids:
            return
        calls = self._begin("reused", block_ids)
        self._own.reused(block_ids)
        self._wait(calls, CALL_TIMEOUT_S)

    def inventory(self, max_blocks: int) -> Iterator[InventoryPart]:
        """See `BlockMover.inventory`: what rank 0 holds every rank holds."""
        return self._own.inventory(max_blocks)

    def pull(
        self,
        *,
        source: Source,
        lease_id: LeaseId,
        loads: Sequence[GroupLoad],
        timeout_s: float,
        cancel: threading.Event,
    ) -> PullOutcome:
        """See `BlockMover.pull`: what counts is what every rank has got.

        A cancel, or a part that has failed when rank 0 has ended, ends those that still run.

        Raises:
            InstanceDiedError, DeadlineError: a rank is gone or stopped, so that nobody knows
                whether it still writes.
        """
        pull_id = f"pull-{next(self._pull_numbers)}"
        end_s = time.monotonic() + timeout_s + PULL_GRACE_S
        running = self._begin("pull", pull_id, source, lease_id, loads, timeout_s)
        try:
            own = self._own.worker.pull(
                source=source, lease_id=lease_id, loads=loads, timeout_s=timeout_s, cancel=cancel
            )
        except Exception as failure:
            # Whatever it was, the others must have ended before anybody hears of it.
            own = failed_pull(failure, len(loads))
        parts = [own]
        while running:
            still = []
            for call in running:
                if call.done(CANCEL_POLL_S):
                    parts.append(self._part(call, len(loads)))
                else:
                    still.append(call)
            running = still
            # Said again until it has ended: the first time it may not even have begun.
            if running and (cancel.is_set() or any(part.error is not None for part in parts)):
                self._begin("cancel_pull", pull_id)
            if running and time.monotonic() > end_s:
                self._lost = DeadlineError(
                    "a rank did not end its part of a pull", given=f"{timeout_s + PULL_GRACE_S:g} s"
                )
                raise self._lost
        outcome = merge_outcomes(parts)
        if outcome.error is not None:
            # Some ranks may have more than counts; it will be computed over.
            self.reused(
                tuple(
                    block_id
                    for load, num_blocks in zip(loads, outcome.num_blocks_of_run, strict=True)
                    for block_id in load.block_ids[num_blocks:]
                )
            )
        return outcome

    def _part(self, call: PendingCall, num_loads: int) -> PullOutcome:
        """Return how another rank's part has ended; errors as in `pull`."""
        try:
            outcome: PullOutcome = call.result(CALL_TIMEOUT_S)
        except (UnavailableError, DeadlineError) as error:
            self._lost = InstanceDiedError(f"nobody knows whether a rank still writes: {error}")
            raise self._lost from error
        except KvferryError as refusal:
            return failed_pull(refusal, num_loads)
        return outcome

    def _begin(self, method: str, *arguments: Any) -> list[PendingCall]:
        if self._lost is not None:
            raise self._lost
        return [other.begin(method, *arguments) for other in self._others]

    def _wait(self, calls: Iterable[PendingCall], timeout_s: float) -> list[Any]:
        try:
            return [call.result(timeout_s) for call in calls]
        except (InstanceDiedError, DeadlineError) as error:
            self._lost = error
            raise
