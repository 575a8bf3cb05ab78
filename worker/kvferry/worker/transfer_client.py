"""Calls to other workers: describe, pull, store. One channel per peer, kept."""

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager

import grpc

from kvferry.proto.errors import DeadlineError, KvferryError, NotFoundError, UnavailableError
from kvferry.proto.grpc_options import CHANNEL_OPTIONS
from kvferry.proto.grpc_status import MAX_CALL_S
from kvferry.proto.ids import BlockId
from kvferry.proto.v1 import transfer_pb2, transfer_pb2_grpc
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.frames import Frame, Header, places_of, plan_frames
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.pull import PullOutcome, receive, require_destinations
from kvferry.worker.source import make_frame
from kvferry.worker.stall_watch import StallWatch
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    WorkerDescription,
    description_from_proto,
    encode_store_part,
    fetch_ask_to_proto,
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
        ask: FetchAsk,
        *,
        memory: KvMemory,
        block_ids: Sequence[BlockId],
        timeout_s: float,
        cancel: threading.Event,
    ) -> PullOutcome:
        """Fetch the asked blocks into `block_ids`, one each, verifying every frame before it lands.

        All writing happens in the calling thread, so the writer is closed when this returns. A
        peer's failure or silence, a cancel or the deadline ends the pull early and is told in the
        outcome. A deadline beyond `MAX_CALL_S`, here and below, counts as that.

        Raises:
            BadInputError: destinations that do not fit the ask or the memory.
        """
        require_destinations(len(ask.hashes), block_ids, memory.num_blocks)
        session = PullSession(len(ask.hashes), memory.geometry)

        def place(frame: Frame) -> None:
            scatter(memory, places_of(frame.segments, block_ids), frame.payload)

        try:
            if timeout_s <= 0:
                raise DeadlineError("the deadline of a pull has passed", given=timeout_s)
            with closing(self._messages(address, ask, timeout_s, cancel)) as messages:
                receive(messages, session, place)
            if session.num_found < session.num_asked:
                raise NotFoundError(
                    f"{address} holds only the first blocks",
                    given=session.num_found,
                    allowed=session.num_asked,
                )
        except _CancelledError:
            return _ended(session, error="the pull was cancelled", error_type="Cancelled")
        except KvferryError as error:
            return _ended(session, error=str(error), error_type=type(error).__name__)
        return _ended(session)

    def store(
        self,
        address: str,
        ask: StoreAsk,
        *,
        memory: KvMemory,
        block_ids: Sequence[BlockId],
        timeout_s: float,
    ) -> int:
        """Send the announced blocks from `block_ids`, one each; return how many are held there now.

        The count is the length of a prefix of `ask.hashes`.

        Raises:
            BadInputError: blocks that do not fit the ask or the memory.
            KvferryError: the peer's refusal, or UnavailableError, or DeadlineError.
        """
        require_destinations(len(ask.hashes), block_ids, memory.num_blocks)

        def parts() -> Iterator[bytes]:
            yield encode_store_part(ask)
            for segments in plan_frames(len(block_ids), memory.geometry):
                payload = gather(memory, places_of(segments, block_ids))
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


def _ended(
    session: PullSession, *, error: str | None = None, error_type: str | None = None
) -> PullOutcome:
    return PullOutcome(
        num_blocks=session.num_complete,
        num_bytes=session.num_bytes,
        num_checksum_failures=session.num_checksum_failures,
        error=error,
        error_type=error_type,
    )
