"""The gRPC front of a worker: it turns messages into values and errors into statuses, no more."""

import logging
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import grpc
from grpc_health.v1 import (
    health,
    health_pb2,
    health_pb2_grpc,
)

from kvferry.proto.bind import join_address, require_safe_bind
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import BusyError, KvferryError
from kvferry.proto.grpc_front import add_reflection, listen, make_server
from kvferry.proto.grpc_status import decode_message
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.bulk_listener import BulkListener
from kvferry.worker.bulk_server import send_bulk, worth_a_socket
from kvferry.worker.frame_wire import encode_settled
from kvferry.worker.frames import Frame, Header, Segment
from kvferry.worker.grpc_errors import abort_with, require_deadline
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.stall_watch import StallWatch
from kvferry.worker.stats import CountedTransfer, StatsCounter
from kvferry.worker.take_wire import TakeAsk, decode_take
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    WorkerDescription,
    decode_fetch,
    decode_store_part,
    description_to_proto,
    encode_header,
)

_log = logging.getLogger(__name__)

# One thread serves one call. A Fetch, Store or Take beyond the limit is refused at once instead of
# waiting unseen behind a slow one, by threads that are kept free for that, Describe and health.
MAX_TRANSFERS = 16
NUM_SPARE_THREADS = 4
# A peer that neither reads nor sends for so long gives its place to another.
STALL_TIMEOUT_S = 30.0
STOP_GRACE_S = 2.0
SERVICE_NAME = "kvferry.transfer.v1.Transfer"


class Transfers(Protocol):
    """What stands behind the front; the calls that reach it are counted in `counter`."""

    counter: StatsCounter

    def describe(self) -> WorkerDescription:
        """Say who this worker is."""

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        """Yield a header, then frames, each of which is settled before the next is asked for."""

    def accept_store(self, parts: Iterator[StoreAsk | Frame]) -> int:
        """Take a header, then frames; return the number of blocks that are here now."""

    def accept_take(self, ask: TakeAsk, *, timeout_s: float, cancel: threading.Event) -> int:
        """Fetch blocks from elsewhere; return the number of blocks that are here now."""


class TransferServer:
    """A listening server from construction to `stop`.

    Args:
        service: what answers.
        bind: host to listen on.
        port: 0 lets the system choose.
        insecure: allow a host beyond loopback without credentials that tell clients apart.
        bulk: offer bulk sockets too, at a port of their own.
        credentials: speak TLS with these; None speaks plaintext.
        reflection: tell clients of the services and messages.
        max_transfers: number of Fetch, Store and Take calls at once.
        stall_s: seconds after which a Fetch or Store whose peer does nothing is ended.

    Raises:
        InsecureBindError: as `require_safe_bind`.
        PortTakenError: another process listens on the port.
        ConfigError: this machine cannot listen on `bind`, or not with these credentials.
    """

    def __init__(
        self,
        service: Transfers,
        *,
        bind: str,
        port: int = 0,
        insecure: bool,
        bulk: bool = True,
        credentials: Credentials | None = None,
        reflection: bool = False,
        max_transfers: int = MAX_TRANSFERS,
        stall_s: float = STALL_TIMEOUT_S,
    ) -> None:
        require_safe_bind(bind, insecure, credentials)
        self._threads = ThreadPoolExecutor(
            max_transfers + NUM_SPARE_THREADS, thread_name_prefix="kvferry-transfer"
        )
        self._server = make_server(self._threads, credentials)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection:
            add_reflection(self._server, [SERVICE_NAME, health.SERVICE_NAME])
        self.port = self._listen(bind, port, credentials)
        self._bulk = BulkListener(bind, credentials) if bulk else None
        handlers = _Handlers(service, self._bulk, max_transfers, stall_s)
        self._server.add_generic_rpc_handlers((handlers.as_grpc(),))
        self.address = join_address(bind, self.port)
        self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        self._server.start()

    def stop(self) -> None:
        """Refuse new calls, give running ones `STOP_GRACE_S`, then end them. Repeating is fine."""
        self._health.enter_graceful_shutdown()
        if self._bulk is not None:
            self._bulk.close()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
        self._threads.shutdown(wait=False)

    def _listen(self, bind: str, port: int, credentials: Credentials | None) -> int:
        try:
            return listen(self._server, bind, port, credentials)
        except KvferryError:
            self._threads.shutdown(wait=False)
            raise


class _Handlers:
    """Every handler catches everything: one that dies silently leaves its client waiting."""

    def __init__(
        self, service: Transfers, bulk: BulkListener | None, max_transfers: int, stall_s: float
    ) -> None:
        self._service = service
        self._bulk = bulk
        self._max_transfers = max_transfers
        self._stall_s = stall_s
        self._places = threading.BoundedSemaphore(max_transfers)

    def as_grpc(self) -> grpc.GenericRpcHandler:
        """Return the service for a gRPC server; messages come in as bytes, Fetch yields bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(
                    self._describe,
                    response_serializer=transfer_pb2.DescribeReply.SerializeToString,
                ),
                "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
                "Store": grpc.stream_unary_rpc_method_handler(
                    self._store,
                    response_serializer=transfer_pb2.StoreReply.SerializeToString,
                ),
                "Take": grpc.unary_unary_rpc_method_handler(
                    self._take,
                    response_serializer=transfer_pb2.StoreReply.SerializeToString,
                ),
            },
        )

    def _describe(
        self, request: bytes, context: grpc.ServicerContext
    ) -> transfer_pb2.DescribeReply:
        try:
            require_deadline(context)
            decode_message(transfer_pb2.DescribeRequest, request)
            return description_to_proto(self._service.describe())
        except Exception as error:
            abort_with(context, error)

    def _fetch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with (
                self._service.counter.transfer("served") as counted,
                self._admitted(context) as watch,
            ):
                ask = decode_fetch(request)
                num_asked, lease_id = len(ask.hashes), ask.lease_id
                _log.debug("%s asks for %d blocks, lease %r", context.peer(), num_asked, lease_id)
                parts = _counting(self._service.open_fetch(ask), counted)
                yield from self._replies(parts, "bulk" in ask.paths, context, watch, counted)
        except Exception as error:
            abort_with(context, error)

    def _replies(
        self,
        parts: Iterator[Header | OutgoingFrame],
        may_offer_bulk: bool,
        context: grpc.ServicerContext,
        watch: StallWatch,
        counted: CountedTransfer,
    ) -> Generator[bytes, None, None]:
        for part in parts:
            # Nobody interrupts a handler whose client has left; it has to look.
            if not context.is_active():
                return
            if isinstance(part, Header):
                if self._bulk is not None and may_offer_bulk and worth_a_socket(part):
                    counted.over("bulk")
                    yield from send_bulk(self._bulk, part, parts, context, watch)
                    return
                yield encode_header(part)
            else:
                message = encode_settled(part)
                if message is not None:
                    yield message
            watch.moved()

    def _store(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> transfer_pb2.StoreReply:
        try:
            with (
                self._service.counter.transfer("stored") as counted,
                self._admitted(context) as watch,
            ):
                parts = _store_parts(requests, watch, counted)
                num_stored = self._service.accept_store(parts)
            return transfer_pb2.StoreReply(num_stored=num_stored)
        except Exception as error:
            abort_with(context, error)

    def _take(self, request: bytes, context: grpc.ServicerContext) -> transfer_pb2.StoreReply:
        try:
            with self._service.counter.transfer("taken"), self._place(context):
                ask, is_over = decode_take(request), threading.Event()
                if not context.add_callback(is_over.set):
                    is_over.set()
                timeout_s = context.time_remaining() or 0.0
                num_stored = self._service.accept_take(ask, timeout_s=timeout_s, cancel=is_over)
            return transfer_pb2.StoreReply(num_stored=num_stored)
        except Exception as error:
            abort_with(context, error)

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext) -> Iterator[StallWatch]:
        """Hold a place, and end the call when its peer stalls; errors as `_place`."""
        # Cancelling is all that another thread can do: it wakes the handler's own.
        with (
            self._place(context),
            StallWatch(context.cancel, stall_s=self._stall_s, poll_s=self._stall_s / 10) as watch,
        ):
            yield watch

    @contextmanager
    def _place(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold one of the places for transfers.

        Raises:
            BadInputError: no deadline, or one too far away.
            BusyError: no place is free.
        """
        require_deadline(context)
        if not self._places.acquire(blocking=False):
            raise BusyError(
                "this worker serves no more transfers at once",
                given=self._max_transfers + 1,
                allowed=self._max_transfers,
            )
        try:
            yield
        finally:
            self._places.release()


def _counting(
    parts: Iterator[Header | OutgoingFrame], counted: CountedTransfer
) -> Iterator[Header | OutgoingFrame]:
    """Yield the parts of an answer, counting what is about to be sent."""
    header: Header | None = None
    for part in parts:
        if isinstance(part, Header):
            header = part
            if header.offer is not None:
                # The receiver copies the blocks itself, and is the one that counts them.
                counted.over("shm")
            counted.is_whole = header.offer is not None or header.num_found == 0
        else:
            counted.moved(sum(map(len, part.pieces)))
            # A receiver that has everything leaves; nobody may ask for what comes after the last.
            counted.is_whole = header is not None and _is_last(part.segments[-1], header)
        yield part


def _is_last(segment: Segment, header: Header) -> bool:
    end = (header.num_found - 1, header.geometry.num_layers)
    return (segment.hash_index, segment.layer_end) == end


def _store_parts(
    requests: Iterator[bytes], watch: StallWatch, counted: CountedTransfer
) -> Iterator[StoreAsk | Frame]:
    for request in requests:
        watch.moved()
        part = decode_store_part(request)
        if isinstance(part, Frame):
            counted.moved(len(part.payload))
        yield part
        # Writing it was our own time.
        watch.moved()
