"""Pulling blocks from an instance of any layout into one rank of another."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvferry.proto.errors import DeadlineError, NotFoundError
from kvferry.proto.ids import BlockHash, GroupId, LeaseId
from kvferry.proto.placement import shape_of
from kvferry.proto.reshard import Transfer, plan_reshard
from kvferry.proto.step_messages import Source
from kvferry.worker.busy_source import PAUSES, Pauses, until_not_busy
from kvferry.worker.fetch_terms import Fetcher, FetchTerms, Peer
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.part_pull import pull_blocks, pull_part, read_blocks
from kvferry.worker.pull import (
    BlockRun,
    PartOutcome,
    PartRun,
    PullOutcome,
    require_destinations,
)
from kvferry.worker.reshard_io import destination_cells
from kvferry.worker.shared_blocks import SharedBlocks, SharedReader


def pull_loads(
    client: Fetcher,
    memory: KvMemory,
    source: Source,
    loads: Sequence[GroupLoad],
    *,
    lease_id: LeaseId,
    timeout_s: float,
    cancel: threading.Event,
    pauses: Pauses = PAUSES,
) -> PullOutcome:
    """Pull this rank's part of the loads, one after the other.

    Where both sides have one layout, whole blocks come from the rank of the same number. Otherwise
    the transfers of a plan come from whichever ranks hold the bytes. A rank that serves no more
    transfers at once is asked again after `pauses`, within the timeout.

    Raises:
        BadInputError: destinations that do not fit the hashes or the memory, or no such group.
    """
    require_destinations(loads, memory.num_blocks)
    terms = FetchTerms(lease_id=lease_id, end_s=time.monotonic() + timeout_s, cancel=cancel)
    pulling = _Pulling(client, memory, source, terms, pauses)
    num_blocks = tuple(pulling.fill(load) for load in loads)
    parts = pulling.outcomes
    failed = pulling.failed
    return PullOutcome(
        num_blocks_of_run=num_blocks,
        num_bytes=sum(part.num_bytes for part in parts),
        num_checksum_failures=sum(part.num_checksum_failures for part in parts),
        error=failed.error if failed else None,
        error_type=failed.error_type if failed else None,
    )


def read_shared(
    client: SharedReader,
    memory: KvMemory,
    source: Source,
    read: Callable[[SharedBlocks], None],
    *,
    group_id: GroupId,
    hashes: Sequence[BlockHash],
    terms: FetchTerms,
) -> int:
    """Have `read` copy blocks out of the memory of a source's rank of the same number.

    Returns:
        how many of the first blocks were copied and held. Less than all where the layouts differ,
        the memory is not mapped here yet, or something failed; `pull_loads` says what.

    Raises:
        DeadlineError: the source is silent, or the time is over: a pull would wait in vain again.
    """
    if not _is_cut_alike(source, memory):
        return 0
    peer = _peer(source, memory, memory.rank)
    outcome = read_blocks(client, peer, group_id, hashes, read, memory=memory, terms=terms)
    if outcome.error_type == DeadlineError.__name__:
        raise DeadlineError(outcome.error or "")
    return outcome.num_in_place


@dataclass(slots=True)
class _Pulling:
    """Pulls one load after the other, until one fails."""

    client: Fetcher
    memory: KvMemory
    source: Source
    terms: FetchTerms
    pauses: Pauses
    outcomes: list[PartOutcome] = field(init=False, default_factory=list)

    @property
    def failed(self) -> PartOutcome | None:
        """The first part that failed."""
        return next((outcome for outcome in self.outcomes if outcome.error is not None), None)

    def fill(self, load: GroupLoad) -> int:
        """Return how many of a load's first blocks are whole on this rank; 0 after one failed."""
        if self.failed is not None:
            return 0
        if _is_cut_alike(self.source, self.memory):
            return self._pull_blocks(load)
        own = self.memory.layout
        start = load.first_block * own.virtual_block_tokens
        plan = plan_reshard(
            self.source.layout,
            own,
            shape_of(self.memory.identity, load.group_id),
            start=start,
            end=start + len(load.block_ids) * own.virtual_block_tokens,
        )
        num_whole = len(load.block_ids)
        for transfer in plan.transfers:
            if transfer.dst_rank == self.memory.rank:
                num_whole = min(num_whole, self._pull_part(load, transfer))
        return num_whole

    def _pull_blocks(self, load: GroupLoad) -> int:
        run = BlockRun(group_id=load.group_id, hashes=load.hashes, block_ids=load.block_ids)
        peer = _peer(self.source, self.memory, self.memory.rank)
        outcome = self._patiently(
            lambda: pull_blocks(self.client, peer, run, memory=self.memory, terms=self.terms)
        )
        return outcome.num_in_place

    def _pull_part(self, load: GroupLoad, transfer: Transfer) -> int:
        """Pull one transfer; return how many of the load's first blocks have all of its tokens.

        The first tokens of a load may be at all other ranks that it needs, so those are asked after
        one that lacks a block, but not after one that failed for another reason.
        """
        if self.outcomes and self.outcomes[-1].error_type not in (None, NotFoundError.__name__):
            return 0
        skipped_tokens = load.first_block * self.memory.layout.block_tokens
        run = PartRun(
            group_id=load.group_id,
            hashes=load.source_hashes,
            transfer=transfer,
            table=np.array(load.block_ids, dtype=np.int64),
            skipped_source_tokens=load.first_source_block * self.source.layout.block_tokens,
            skipped_tokens=skipped_tokens,
        )
        peer = _peer(self.source, self.memory, transfer.src_rank)
        outcome = self._patiently(
            lambda: pull_part(self.client, peer, run, memory=self.memory, terms=self.terms)
        )
        if outcome.num_in_place == transfer.num_tokens:
            return len(load.block_ids)
        tokens = destination_cells(transfer, skipped_tokens=skipped_tokens).tokens
        return int(tokens[outcome.num_in_place]) // self.memory.layout.block_tokens

    def _patiently(self, pull: Callable[[], PartOutcome]) -> PartOutcome:
        outcome = until_not_busy(pull, self.terms, self.pauses)
        self.outcomes.append(outcome)
        return outcome


def _is_cut_alike(source: Source, memory: KvMemory) -> bool:
    return replace(source.layout, memory=memory.layout.memory) == memory.layout


def _peer(source: Source, memory: KvMemory, rank: int) -> Peer:
    return Peer(
        address=source.rank_addresses[rank],
        identity=memory.identity,
        layout=source.layout,
        rank=rank,
        incarnation=source.incarnation,
    )
