"""Pulling from one rank of another instance: a run of whole blocks, or one transfer of a plan."""

from collections.abc import Callable, Sequence

from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import BlockHash, GroupId
from kvferry.worker.block_destination import BlockDestination
from kvferry.worker.chunks import Chunks
from kvferry.worker.fetch_terms import CancelledPullError, Fetcher, FetchTerms, Peer
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.pull import CANCELLED, BlockRun, PartOutcome, PartRun
from kvferry.worker.reshard_io import destination_cells, require_cells
from kvferry.worker.selection import Selection, selection_of
from kvferry.worker.shared_blocks import SharedBlocks, SharedReader
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk, make_fetch_ask


def pull_blocks(
    client: Fetcher, peer: Peer, run: BlockRun, *, memory: KvMemory, terms: FetchTerms
) -> PartOutcome:
    """Fetch whole blocks from the same rank of another instance of the memory's layout.

    Whatever goes wrong ends the pull early and is told in the outcome: a peer's failure or silence,
    a cancel, the deadline, or that the peer holds only the beginning. For a run without hashes
    nobody is called.

    Raises:
        BadInputError: a group that the memory does not have.
    """
    group = memory.group(run.group_id)
    session = PullSession(len(run.hashes), group.geometry)
    ask = _ask(peer, run.group_id, run.hashes, terms)

    def fetch() -> None:
        if run.hashes:
            destination = BlockDestination(group, run.block_ids)
            client.fetch(peer, ask, destination, session, terms)

    error, error_type = _error_of(fetch)
    return _outcome(session, session.num_complete, error, error_type)


def read_blocks(
    client: SharedReader,
    peer: Peer,
    group_id: GroupId,
    hashes: Sequence[BlockHash],
    read: Callable[[SharedBlocks], None],
    *,
    memory: KvMemory,
    terms: FetchTerms,
) -> PartOutcome:
    """Have `read` copy whole blocks out of a peer's memory instead, where that is mapped already.

    Elsewhere nothing is in place and there is no error; otherwise as `pull_blocks`.

    Raises:
        BadInputError: a group that the memory does not have.
    """
    session = PullSession(len(hashes), memory.group(group_id).geometry)
    ask = _ask(peer, group_id, hashes, terms)
    error, error_type = _error_of(lambda: client.read_shared(peer, ask, read, session, terms))
    return _outcome(session, session.num_complete, error, error_type)


def pull_part(
    client: Fetcher, peer: Peer, run: PartRun, *, memory: KvMemory, terms: FetchTerms
) -> PartOutcome:
    """Fetch one transfer of a plan; otherwise as `pull_blocks`.

    Raises:
        BadInputError: a transfer that does not fit the memory or the block table, begins before the
            first hash, or is of a group that the memory does not have.
    """
    group, transfer = memory.group(run.group_id), run.transfer
    cells = destination_cells(transfer, skipped_tokens=run.skipped_tokens)
    require_cells(group, run.table, cells)
    chunks = Chunks(group, run.table, cells)
    session = PullSession(
        chunks.num_chunks, chunks.geometry, last_page_bytes=chunks.last_page_bytes
    )
    selection = selection_of(transfer, skipped_tokens=run.skipped_source_tokens)
    ask = _ask(peer, run.group_id, run.hashes, terms, selection)

    def fetch() -> None:
        client.fetch(peer, ask, chunks, session, terms)

    error, error_type = _error_of(fetch)
    return _outcome(session, chunks.tokens_of(session.num_complete), error, error_type)


def _ask(
    peer: Peer,
    group_id: GroupId,
    hashes: Sequence[BlockHash],
    terms: FetchTerms,
    selection: Selection | None = None,
) -> FetchAsk:
    return make_fetch_ask(
        peer.identity,
        hashes,
        group_id=group_id,
        lease_id=terms.lease_id,
        incarnation=peer.incarnation,
        selection=selection,
        layout=peer.layout,
        rank=peer.rank,
    )


def _outcome(
    session: PullSession, num_in_place: int, error: str | None, error_type: str | None
) -> PartOutcome:
    return PartOutcome(
        num_in_place=num_in_place,
        num_bytes=session.num_bytes,
        num_checksum_failures=session.num_checksum_failures,
        error=error,
        error_type=error_type,
    )


def _error_of(fetch: Callable[[], None]) -> tuple[str | None, str | None]:
    """Run a fetch and return the error and its class's name, of a peer's failure or a cancel."""
    try:
        fetch()
    except CancelledPullError:
        return "the pull was cancelled", CANCELLED
    except KvferryError as failure:
        return str(failure), type(failure).__name__
    return None, None
