"""Calls to other workers: describe, pull, store. One channel per peer, kept."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager

import grpc

from kvferry.proto.errors import DeadlineError, KvferryError, NotFoundError, UnavailableError
from kvferry.proto.grpc_options import CHANNEL_OPTIONS
from kvferry.proto.grpc_status import MAX_CALL_S
from kvferry.proto.identity import Identity
from kvferry.proto.ids import GroupId, Incarnation, LeaseId
from kvferry.proto.v1 import transfer_pb2, transfer_pb2_grpc
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.chunks import Chunks
from kvferry.worker.frames import Frame, Header, places_of, plan_frames
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.pull import (
    CANCELLED,
    BlockRun,
    PartOutcome,
    PartRun,
    PullOutcome,
    receive,
    require_destinations,
)
from kvferry.worker.reshard_io import destination_cells, require_cells
from kvferry.worker.selection import selection_of
from kvferry.worker.source import make_frame
from kvferry.worker.stall_watch import StallWatch
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    FetchAsk,
    WorkerDescription,
    description_from_proto,
    encode_store_part,
    fetch_ask_to_proto,
    make_fetch_ask,
    make_store_ask,
    reply_from_proto,
)

# How long a cancelled pull may go on waiting for the network.
CANCEL_POLL_S = 0.02
# A source that is alive sends something far sooner; one that is frozen keeps its connection.
STALL_TIMEOUT_S = 5.0

STORE_METHOD = "/kvferry.transfer.v1.Transfer/Store"


class _CancelledError(Exception):
    """The caller of a pull gave it up."""


class TransferClient:
    """Thread-safe. Make it after a fork, never before: gRPC does not survive one.

    Args:
        stall_s: seconds without a message after which a pull is ended.
    """

    def __init__(self, *, stall_s: float = STALL_TIMEOUT_S) -> None:
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def describe(self, address: str, *, timeout_s: float) -> WorkerDescription:
        """Return who listens at `address` ("host:port").

        Raises:
            KvferryError: the peer's refusal, or UnavailableError, or DeadlineError.
        """
        with self._channel(address) as channel:
            stub = transfer_pb2_grpc.TransferStub(channel)
            reply = stub.Describe(
                transfer_pb2.DescribeRequest(), timeout=min(timeout_s, MAX_CALL_S)
            )
        return description_from_proto(reply)

    def pull(
        self,
        address: str,
        runs: Sequence[BlockRun],
        *,
        identity: Identity,
        memory: KvMemory,
        lease_id: LeaseId,
        incarnation: Incarnation,
        timeout_s: float,
        cancel: threading.Event,
    ) -> PullOutcome:
        """Fetch runs of blocks from the same rank of another instance of the memory's layout.

        One run after the other, verifying every frame before it lands.

        All writing happens in the calling thread, so the writer is closed when this returns. A
        peer's failure or silence, a cancel, the deadline, or a run that the peer holds only the
        beginning of ends the pull early and is told in the outcome; runs before that one are whole.
        For a run without hashes nobody is called. A deadline beyond `MAX_CALL_S`, here and below,
        counts as that.

        Raises:
            BadInputError: destinations that do not fit the hashes or the memory, or a group that
                the memory does not have.
        """
        require_destinations(runs, memory.num_blocks)
        sessions = [
            PullSession(len(run.hashes), memory.group(run.group_id).geometry) for run in runs
        ]
        end_s = time.monotonic() + timeout_s

        def pull_all() -> None:
            for run, session in zip(runs, sessions, strict=True):
                if not run.hashes:
                    continue
                ask = make_fetch_ask(
                    identity,
                    run.hashes,
                    group_id=run.group_id,
                    lease_id=lease_id,
                    incarnation=incarnation,
                    layout=memory.layout,
                    rank=memory.rank,
                )
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError("the deadline of a pull has passed", given=timeout_s)
                with closing(self._messages(address, ask, left_s, cancel)) as messages:
                    _receive_run(messages, session, memory, run, address)

        error, error_type = _error_of(pull_all)
        return PullOutcome(
            num_blocks_of_run=tuple(session.num_complete for session in sessions),
            num_bytes=sum(session.num_bytes for session in sessions),
            num_checksum_failures=sum(session.num_checksum_failures for session in sessions),
            error=error,
            error_type=error_type,
        )

    def pull_part(
        self,
        address: str,
        run: PartRun,
        *,
        identity: Identity,
        memory: KvMemory,
        lease_id: LeaseId,
        incarnation: Incarnation,
        timeout_s: float,
        cancel: threading.Event,
    ) -> PartOutcome:
        """Fetch one transfer of a plan; otherwise as `pull`.

        Raises:
            BadInputError: a transfer that does not fit the memory or the block table, begins before
                the first hash, or is of a group that the memory does not have.
        """
        group, transfer = memory.group(run.group_id), run.transfer
        cells = destination_cells(transfer, skipped_tokens=run.skipped_tokens)
        require_cells(group, run.table, cells)
        chunks = Chunks(group, run.table, cells)
        session = PullSession(
            chunks.num_chunks, chunks.geometry, last_page_bytes=chunks.last_page_bytes
        )
        ask = make_fetch_ask(
            identity,
            run.hashes,
            group_id=run.group_id,
            lease_id=lease_id,
            incarnation=incarnation,
            selection=selection_of(transfer, skipped_tokens=run.skipped_source_tokens),
            layout=run.source,
            rank=transfer.src_rank,
        )

        def pull() -> None:
            with closing(self._messages(address, ask, timeout_s, cancel)) as messages:
                receive(
                    messages, session, lambda frame: chunks.write(frame.segments, frame.payload)
                )
            _require_everything(session, run.group_id, address)

        error, error_type = _error_of(pull)
        return PartOutcome(
            num_tokens=chunks.tokens_of(session.num_complete),
            num_bytes=session.num_bytes,
            num_checksum_failures=session.num_checksum_failures,
            error=error,
            error_type=error_type,
        )

    def store(
        self,
        address: str,
        run: BlockRun,
        *,
        identity: Identity,
        memory: KvMemory,
        timeout_s: float,
    ) -> int:
        """Send a run of blocks; return how many are held there now.

        The count is the length of a prefix of the run's hashes.

        Raises:
            BadInputError: blocks that do not fit the hashes or the memory, or a group that the
                memory does not have.
            KvferryError: the peer's refusal, or UnavailableError, or DeadlineError.
        """
        require_destinations([run], memory.num_blocks)
        group = memory.group(run.group_id)

        def parts() -> Iterator[bytes]:
            yield encode_store_part(
                make_store_ask(identity, run.hashes, group.geometry, group_id=run.group_id)
            )
            for segments in plan_frames(len(run.hashes), group.geometry):
                payload = gather(group, places_of(segments, run.block_ids))
                yield encode_store_part(make_frame(segments, payload))

        with self._channel(address) as channel:
            # The generated stub would serialise the parts, which are encoded already.
            send: grpc.StreamUnaryMultiCallable[bytes, transfer_pb2.StoreReply]
            send = channel.stream_unary(
                STORE_METHOD, response_deserializer=transfer_pb2.StoreReply.FromString
            )
            reply = send(parts(), timeout=min(timeout_s, MAX_CALL_S))
        return reply.num_stored

    def close(self) -> None:
        """Close all channels; calls under way end with UnavailableError."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _messages(
        self, address: str, ask: FetchAsk, timeout_s: float, cancel: threading.Event
    ) -> Generator[Header | Frame, None, None]:
        if cancel.is_set():
            raise _CancelledError
        with self._channel(address) as channel:
            stub = transfer_pb2_grpc.TransferStub(channel)
            call = stub.Fetch(fetch_ask_to_proto(ask), timeout=min(timeout_s, MAX_CALL_S))
            watch = StallWatch(
                call.cancel, stall_s=self._stall_s, poll_s=CANCEL_POLL_S, cancel=cancel
            )
            try:
                with watch:
                    for message in call:
                        if cancel.is_set():
                            raise _CancelledError
                        watch.moved()
                        yield reply_from_proto(message)
                        # Placing it was our own time.
                        watch.moved()
            except grpc.RpcError as error:
                if cancel.is_set():
                    raise _CancelledError from error
                if watch.stalled:
                    raise DeadlineError(
                        f"{address} sent nothing for too long", allowed=f"{self._stall_s} s"
                    ) from error
                raise
            finally:
                call.cancel()

    @contextmanager
    def _channel(self, address: str) -> Iterator[grpc.Channel]:
        """Lend the peer's channel; failed calls come out as kvferry's errors."""
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                self._channels[address] = channel
        try:
            yield channel
        except grpc.RpcError as failed:
            error = error_of_call(failed, address)
            if isinstance(error, UnavailableError):
                self._forget(address, channel)
            raise error from failed

    def _forget(self, address: str, channel: grpc.Channel) -> None:
        """Open a fresh channel for the next call; other calls under way keep the old one."""
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]


def _receive_run(
    messages: Iterator[Header | Frame],
    session: PullSession,
    memory: KvMemory,
    run: BlockRun,
    address: str,
) -> None:
    """Put one run's frames into its blocks; raise NotFoundError if the peer lacks some of it."""
    group = memory.group(run.group_id)

    def place(frame: Frame) -> None:
        scatter(group, places_of(frame.segments, run.block_ids), frame.payload)

    receive(messages, session, place)
    _require_everything(session, run.group_id, address)


def _require_everything(session: PullSession, group_id: GroupId, address: str) -> None:
    if session.num_found < session.num_asked:
        raise NotFoundError(
            f"{address} holds only the first blocks of group {group_id}",
            given=session.num_found,
            allowed=session.num_asked,
        )


def _error_of(pull: Callable[[], None]) -> tuple[str | None, str | None]:
    """Run a pull and return the error and its class's name, of a peer's failure or a cancel."""
    try:
        pull()
    except _CancelledError:
        return "the pull was cancelled", CANCELLED
    except KvferryError as failure:
        return str(failure), type(failure).__name__
    return None, None
