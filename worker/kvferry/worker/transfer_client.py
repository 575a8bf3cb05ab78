"""Calls to other workers: describe, fetch by whichever path is best, store, take."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain

import grpc

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import (
    DeadlineError,
    KvferryError,
    NotFoundError,
    TransferError,
    UnavailableError,
)
from kvferry.proto.grpc_status import MAX_CALL_S
from kvferry.proto.identity import Identity
from kvferry.proto.ids import BlockHash, GroupId
from kvferry.proto.step_messages import Source
from kvferry.proto.v1 import transfer_pb2, transfer_pb2_grpc
from kvferry.worker.block_io import pieces_of
from kvferry.worker.bulk_connection import connected
from kvferry.worker.bulk_wire import receive_frames
from kvferry.worker.checksum import frame_checksum, segment_checksums
from kvferry.worker.destination import Destination
from kvferry.worker.fetch_stream import FetchStream
from kvferry.worker.fetch_terms import CancelledPullError, FetchTerms, Peer
from kvferry.worker.frame_wire import encode_frame
from kvferry.worker.frames import BulkOffer, Header, SharedOffer, places_of, plan_frames
from kvferry.worker.grpc_channels import Channels
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.paths import ALL_PATHS, Path, this_place
from kvferry.worker.peer_memories import PeerMemories
from kvferry.worker.peer_memory import PeerMemory, copy_frames, read_shared
from kvferry.worker.pull import CANCELLED, BlockRun, receive, require_destinations
from kvferry.worker.shared_blocks import SharedBlocks
from kvferry.worker.stats import CountedTransfer, StatsCounter
from kvferry.worker.take_wire import make_take_ask, take_ask_to_proto
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    FetchAsk,
    WorkerDescription,
    description_from_proto,
    encode_store_header,
    fetch_ask_to_proto,
    make_store_ask,
)
from kvferry.worker.unusable_paths import PathUnusableError, UnusablePaths

# A source that is alive sends something far sooner; one that is frozen keeps its connection.
STALL_TIMEOUT_S = 5.0

FETCH_METHOD = "/kvferry.transfer.v1.Transfer/Fetch"
STORE_METHOD = "/kvferry.transfer.v1.Transfer/Store"


class TransferClient:
    """Thread-safe. Make it after a fork, never before: gRPC does not survive one.

    Args:
        credentials: what this client shows to peers, and asks of them; None speaks plaintext.
        stall_s: seconds without a message after which a fetch is ended.
        paths: those it may take besides gRPC.
        counter: where its fetches are counted, if anybody wants to know.
    """

    def __init__(
        self,
        credentials: Credentials | None = None,
        *,
        stall_s: float = STALL_TIMEOUT_S,
        paths: Sequence[Path] = ALL_PATHS,
        counter: StatsCounter | None = None,
    ) -> None:
        self._credentials = credentials
        self._stall_s = stall_s
        self._counter = StatsCounter() if counter is None else counter
        self._channels = Channels(credentials)
        self._paths = UnusablePaths(paths)
        self._memories = PeerMemories()

    def describe(self, address: str, *, timeout_s: float) -> WorkerDescription:
        """Return who listens at `address` ("host:port").

        Raises:
            KvferryError: the peer's refusal, or UnavailableError, or DeadlineError.
        """
        with self._channels.lend(address) as channel:
            stub = transfer_pb2_grpc.TransferStub(channel)
            reply = stub.Describe(
                transfer_pb2.DescribeRequest(), timeout=min(timeout_s, MAX_CALL_S)
            )
        return description_from_proto(reply)

    def fetch(
        self,
        peer: Peer,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        """Put what is asked of a peer into `destination`; what came is in `session`.

        All writing happens in the calling thread, so the writer is closed when this returns or
        raises. A deadline beyond `MAX_CALL_S` counts as that.

        Args:
            peer: whom to ask.
            ask: what for; its paths are chosen here.
            destination: where the bytes are put.
            session: of this fetch alone.
            terms: deadline and cancel.

        Raises:
            NotFoundError: the peer holds only the beginning of it, which is in place.
            KvferryError: the peer's refusal, what was wrong with what it sent, UnavailableError, or
                DeadlineError.
            CancelledPullError: the caller gave it up.
        """

        def receive_from(stream: FetchStream, counted: CountedTransfer) -> None:
            self._receive(stream, destination, session, counted)

        while True:
            paths = self._paths.usable(peer.address)
            tried = replace(ask, paths=paths, place=this_place() if "shm" in paths else "")
            try:
                self._fetch(peer, tried, session, terms, receive_from)
            except PathUnusableError as unusable:
                # Nothing has been received yet, so the session is as it was.
                self._paths.avoid(peer.address, unusable)
            else:
                return

    def read_shared(
        self,
        peer: Peer,
        ask: FetchAsk,
        read: Callable[[SharedBlocks], None],
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        """Have `read` copy blocks out of a peer's memory; what it copied and still held counts.

        Only where that memory is mapped here already, by an earlier `fetch`. Other peers are asked
        nothing, and the session stays as it is.

        Raises:
            NotFoundError, KvferryError, CancelledPullError: as `fetch`.
        """

        def receive_from(stream: FetchStream, counted: CountedTransfer) -> None:
            header = stream.next()
            if not isinstance(header, Header) or not isinstance(header.offer, SharedOffer):
                raise TransferError("blocks are not offered in the memory that is mapped")
            memory = self._memory(stream, header.offer, counted)
            blocks = memory.blocks(header.offer, ask.group_id, terms)
            _require_announced(len(blocks.block_ids), header)
            session.open(header)
            read(blocks)
            num_held = blocks.num_held()
            for segments in plan_frames(num_held, header.geometry):
                session.placed(segments)
            if num_held < header.num_found:
                raise NotFoundError(
                    "a block left its place while it was read", given={"hash_index": num_held}
                )

        if self._memories.is_mapped(peer.address):
            try:
                asked = replace(ask, paths=("shm",), place=this_place())
                self._fetch(peer, asked, session, terms, receive_from)
            except PathUnusableError as unusable:
                self._paths.avoid(peer.address, unusable)

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
            yield encode_store_header(
                make_store_ask(identity, run.hashes, group.geometry, group_id=run.group_id)
            )
            for segments in plan_frames(len(run.hashes), group.geometry):
                pieces = pieces_of(group, places_of(segments, run.block_ids))
                checksum = frame_checksum(segment_checksums(segments, pieces))
                yield encode_frame(segments, checksum, pieces)

        with self._channels.lend(address) as channel:
            # The generated stub would serialise the parts, which are encoded already.
            send: grpc.StreamUnaryMultiCallable[bytes, transfer_pb2.StoreReply]
            send = channel.stream_unary(
                STORE_METHOD, response_deserializer=transfer_pb2.StoreReply.FromString
            )
            reply = send(parts(), timeout=min(timeout_s, MAX_CALL_S))
        return reply.num_stored

    def take(
        self,
        address: str,
        *,
        identity: Identity,
        group_id: GroupId,
        hashes: Sequence[BlockHash],
        first_block: int,
        source: Source,
        timeout_s: float,
    ) -> int:
        """Have a store fetch blocks from `source` by itself; return how many it holds now.

        The count is the length of a prefix of the hashes. What the source does not hold shortens
        it and is no error.

        Args:
            address: the store's.
            identity: what the blocks were computed under.
            group_id: whose blocks.
            hashes: consecutive ones of the sequence's chain.
            first_block: which hash block of the sequence the first of them is.
            source: who has them; its (virtual) blocks are hash blocks.
            timeout_s: deadline in seconds, at most `MAX_CALL_S`.

        Raises:
            BadInputError: hashes of different sizes.
            KvferryError: the store's refusal, why the source gave less, UnavailableError, or
                DeadlineError.
        """
        ask = make_take_ask(
            identity, hashes, group_id=group_id, first_block=first_block, source=source
        )
        with self._channels.lend(address) as channel:
            stub = transfer_pb2_grpc.TransferStub(channel)
            reply = stub.Take(take_ask_to_proto(ask), timeout=min(timeout_s, MAX_CALL_S))
        return reply.num_stored

    def close(self) -> None:
        """Close all channels; calls under way end with UnavailableError."""
        self._channels.close()
        self._memories.close()

    def _fetch(
        self,
        peer: Peer,
        ask: FetchAsk,
        session: PullSession,
        terms: FetchTerms,
        receive_from: Callable[[FetchStream, CountedTransfer], None],
    ) -> None:
        with self._counter.transfer("pulled") as counted:
            try:
                with self._stream(peer, ask, terms) as stream:
                    receive_from(stream, counted)
            except CancelledPullError:
                counted.failed(CANCELLED)
                raise
            finally:
                counted.moved(session.num_bytes)
            if session.num_found < session.num_asked:
                raise NotFoundError(
                    f"{peer.address} holds only the first blocks of group {ask.group_id}",
                    given=session.num_found,
                    allowed=session.num_asked,
                )

    def _receive(
        self,
        stream: FetchStream,
        destination: Destination,
        session: PullSession,
        counted: CountedTransfer,
    ) -> None:
        first = stream.next()
        if isinstance(first, Header) and isinstance(first.offer, SharedOffer):
            memory = self._memory(stream, first.offer, counted)
            served = memory.served(first.offer, stream.ask)
            _require_announced(served.num_found, first)
            session.open(first)
            copy_frames(read_shared(served, stream.ask), session, destination, stream.terms)
            session.close()
        elif isinstance(first, Header) and isinstance(first.offer, BulkOffer):
            counted.over("bulk")
            bulk = connected(
                stream.peer,
                first.offer,
                self._credentials,
                stream.terms,
                also_stop=stream.also_stop,
            )
            _receive_bulk(bulk, stream, first, destination, session)
        else:
            messages = chain([] if first is None else [first], stream)
            receive(messages, session, lambda one: destination.write(one.segments, one.payload))

    def _memory(
        self, stream: FetchStream, offer: SharedOffer, counted: CountedTransfer
    ) -> PeerMemory:
        counted.over("shm")
        # From here on the peer has nothing to do, however long the copy takes.
        stream.watch.end()
        return self._memories.of(stream.peer, offer.socket, stream.terms)

    @contextmanager
    def _stream(self, peer: Peer, ask: FetchAsk, terms: FetchTerms) -> Iterator[FetchStream]:
        left_s = terms.require_s()
        with self._channels.lend(peer.address) as channel:
            fetch: grpc.UnaryStreamMultiCallable[transfer_pb2.FetchRequest, bytes]
            fetch = channel.unary_stream(
                FETCH_METHOD, request_serializer=transfer_pb2.FetchRequest.SerializeToString
            )
            call = fetch(fetch_ask_to_proto(ask), timeout=min(left_s, MAX_CALL_S))
            stream = FetchStream(peer, ask, terms, call, self._stall_s)
            try:
                with stream.watch:
                    yield stream
            except (grpc.RpcError, KvferryError) as error:
                # What was closed from outside fails in one way or another.
                terms.require_wanted()
                if stream.watch.is_late:
                    raise DeadlineError(f"{peer.address} was not done by the deadline") from error
                if stream.watch.stalled:
                    raise DeadlineError(
                        f"{peer.address} sent nothing for too long", allowed=f"{self._stall_s} s"
                    ) from error
                raise
            finally:
                call.cancel()


def _require_announced(num_offered: int, header: Header) -> None:
    if num_offered != header.num_found:
        raise TransferError(
            "an offer of other blocks than are announced",
            given=num_offered,
            allowed=header.num_found,
        )


def _receive_bulk(
    bulk: AbstractContextManager[socket.socket],
    stream: FetchStream,
    header: Header,
    destination: Destination,
    session: PullSession,
) -> None:
    broken: KvferryError | None = None
    with bulk as connection:
        session.open(header)
        try:
            receive_frames(connection, session, destination, stream.watch.moved)
        except UnavailableError as error:
            broken = error
    if not session.is_finished:
        # Why it ended early is said in the call.
        for _ in stream:
            raise TransferError("a frame in the call besides those by the bulk socket")
        if broken is not None:
            raise broken
    session.close()
