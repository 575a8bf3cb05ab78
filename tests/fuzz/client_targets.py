"""What a client is told by workers: replies, bulk frames, offers of memory, errors."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from random import Random
from unittest.mock import patch

from tests.fuzz.mutating import altered, damaged, disordered
from tests.fuzz.server_targets import BLOCK_BYTES, CONTENT, HASHES, NUM_BLOCKS, SIZES
from tests.integration.transfer_peer import content_of, fill, new_worker
from tests.tampering import make_frame

from kvferry.proto.errors import KvferryError
from kvferry.proto.grpc_status import encode_error, error_from_status
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation, LeaseId
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker import bulk_connection, peer_memory
from kvferry.worker.block_destination import BlockDestination
from kvferry.worker.block_io import gather
from kvferry.worker.bulk_wire import _PREFIX, _TRAILER, proof_of
from kvferry.worker.fetch_stream import FetchStream
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frame_wire import encode_envelope, encode_frame
from kvferry.worker.frames import BulkOffer, Header, Place, Segment, SharedOffer, plan_frames
from kvferry.worker.source import find_prefix
from kvferry.worker.stats import StatsCounter
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    description_from_proto,
    description_to_proto,
    encode_header,
    make_fetch_ask,
)
from kvferry.worker.unusable_paths import PathUnusableError

HONEST = {content[at : at + 128] for content in CONTENT.values() for at in (0, 128)}
BULK_PORT = 4711
TICKET = b"t" * 16


class Scripted:
    """A call whose replies are known."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._left = iter(messages)

    def __iter__(self) -> Iterator[bytes]:
        return self._left

    def cancel(self) -> None:
        pass


class Receiver:
    """A client that pulls all of `HASHES` from a peer that says what it is given to say."""

    def __init__(self) -> None:
        self.source = new_worker(1, **SIZES, paths=["shm"])
        fill(self.source)
        self._address = self.source.serve()
        self._taker = new_worker(2, **SIZES)
        (self._group,) = self._taker.memory.groups
        self._client = TransferClient()
        self._peer = Peer(
            address=self._address,
            identity=self.source.identity,
            layout=self.source.memory.layout,
            rank=0,
            incarnation=Incarnation(1),
        )
        self._ask = make_fetch_ask(self.source.identity, HASHES)
        self._header = Header(incarnation=1, num_found=NUM_BLOCKS, geometry=self._group.geometry)
        plan = list(plan_frames(NUM_BLOCKS, self._group.geometry, BLOCK_BYTES))
        payloads = [content_of(index, BLOCK_BYTES) for index in range(NUM_BLOCKS)]
        self._frames = [
            encode_frame(segments, make_frame(segments, payload).checksum, [payload])
            for segments, payload in zip(plan, payloads, strict=True)
        ]
        self._bulk_parts = [
            part
            for segments, payload in zip(plan, payloads, strict=True)
            for part in _bulk_frame(segments, payload)
        ]
        door = self.source._door
        assert door is not None
        self._door = door
        residents = find_prefix(self.source.residency, HASHES, FIRST_GROUP)
        offer = SharedOffer(
            socket=door.name,
            block_ids=tuple(one.block_id for one in residents),
            generations=tuple(one.generation for one in residents),
        )
        self._shared = encode_header(replace(self._header, offer=offer))
        bulk = BulkOffer(port=BULK_PORT, ticket=TICKET)
        self._bulk = encode_header(replace(self._header, offer=bulk))

    def stop(self) -> None:
        self._client.close()
        self._taker.stop()
        self.source.stop()

    def in_the_call(self, random: Random) -> None:
        """Let frames come in the call, in disorder, one of them damaged."""
        messages = disordered(random, [encode_header(self._header), *self._frames])
        if messages and random.random() < 0.8:
            at = random.randrange(len(messages))
            messages[at] = _spoilt(random, messages[at])
        self._require_only_honest(messages)

    def from_memory(self, random: Random) -> None:
        """Let a damaged offer of memory come."""
        self._require_only_honest([_spoilt(random, self._shared)])

    def by_bulk(self, random: Random) -> None:
        """Let frames come by a bulk socket, in disorder and damaged."""
        stream = b"".join(disordered(random, self._bulk_parts))
        if random.random() < 0.7:
            stream = damaged(random, stream)
        header = self._bulk if random.random() < 0.9 else _spoilt(random, self._bulk)
        self._require_only_honest([header], stream)

    def attach(self, random: Random) -> None:
        """Let the door say something else, and hand out something else."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = self._door._message
        if random.random() < 0.9:
            message = damaged(random, message)
        descriptors = [arena.fd for arena in self._door._arenas]
        if random.random() < 0.3:
            random.shuffle(descriptors)
        del descriptors[random.choice((0, 1, 2, 2, 2, 2)) :]
        with theirs, patch.object(peer_memory, "_connect", lambda *_: ours):
            socket.send_fds(theirs, [message or b"\0"], descriptors)
            with suppress(KvferryError):
                _, connection = peer_memory.attach("door", self._peer)
                connection.close()
        ours.close()

    def error(self, random: Random) -> None:
        """Let a call fail with damaged metadata or details."""
        whole = encode_error(KvferryError("no", given={"a": [1, 2]}, allowed="yes"))
        status = random.choice(("UNAVAILABLE", "RESOURCE_EXHAUSTED", "NOT_FOUND", "", "X"))
        larger = f"message larger than max ({'7' * random.randrange(6000)} vs. 64)"
        details = random.choice(("why", larger, ""))
        text = damaged(random, details.encode()).decode(errors="replace")[:8000]
        encoded = random.choice(
            (None, damaged(random, whole)[:8000], b"[" * random.randrange(8000))
        )
        assert isinstance(error_from_status(status, text, encoded), KvferryError)

    def description(self, random: Random) -> None:
        """Let a peer describe itself wrongly."""
        good = description_to_proto(self.source.describe())
        with suppress(KvferryError):
            description_from_proto(transfer_pb2.DescribeReply.FromString(altered(random, good)))

    def require_as_before(self) -> None:
        """A good pull by every path brings everything."""
        everything = [encode_header(self._header), *self._frames]
        assert self._receive(everything, b"") == (NUM_BLOCKS, None)
        assert self._receive([self._bulk], b"".join(self._bulk_parts)) == (NUM_BLOCKS, None)
        assert self._receive([self._shared], b"") == (NUM_BLOCKS, None)
        for index, content in enumerate(CONTENT.values()):
            assert gather(self._group, [Place(BlockId(NUM_BLOCKS - index), 0, 2)]) == content

    def _require_only_honest(self, messages: Sequence[bytes], bulk: bytes = b"") -> None:
        for storage in self._group.sides:
            for side in storage:
                side[:] = 0
        num_complete, error = self._receive(messages, bulk)
        assert (error is None) <= (num_complete == NUM_BLOCKS), "short, and nobody says so"
        for index in range(num_complete):
            for layer in range(2):
                page = Place(BlockId(NUM_BLOCKS - index), layer, layer + 1)
                assert gather(self._group, [page]) in HONEST
        assert gather(self._group, [Place(BlockId(0), 0, 2)]) == bytes(BLOCK_BYTES)

    def _receive(self, messages: Sequence[bytes], bulk: bytes) -> tuple[int, Exception | None]:
        """Return how many of the first blocks are whole, and why no more."""
        terms = FetchTerms(lease_id=LeaseId(""), end_s=float("inf"), cancel=threading.Event())
        session = PullSession(NUM_BLOCKS, self._group.geometry)
        blocks = [BlockId(NUM_BLOCKS - index) for index in range(NUM_BLOCKS)]
        destination = BlockDestination(self._group, blocks)
        stream = FetchStream(self._peer, self._ask, terms, Scripted(messages), 60.0)
        counted = StatsCounter().transfer("pulled")
        with ExitStack() as far:
            connect = _connecting(bulk, far)
            try:
                with patch.object(bulk_connection, "_connect", connect):
                    self._client._receive(stream, destination, session, counted)
            except (KvferryError, PathUnusableError) as error:
                return session.num_complete, error
        if session.num_found < session.num_asked:
            return session.num_complete, KvferryError("holds only the first")
        return session.num_complete, None


def _connecting(stream: bytes, far: ExitStack) -> Callable[..., socket.socket]:
    """Return what connects to a peer that has said all of `stream`; its end is put into `far`."""

    def connect(host: str, port: int, credentials: object, timeout_s: float) -> socket.socket:
        if not 0 <= port < 1 << 16:
            socket.create_connection((host, port))
        if port != BULK_PORT:
            raise ConnectionRefusedError
        ours, theirs = socket.socketpair()
        far.enter_context(theirs).sendall((proof_of(TICKET) + stream)[: 64 << 10])
        theirs.shutdown(socket.SHUT_WR)
        if not stream:
            theirs.close()
        return ours

    return connect


def _spoilt(random: Random, message: bytes) -> bytes:
    if random.random() < 0.5:
        return damaged(random, message)
    return altered(random, transfer_pb2.FetchReply.FromString(message))


def _bulk_frame(segments: tuple[Segment, ...], payload: bytes) -> tuple[bytes, bytes]:
    """A frame as it travels, in two parts that can be lost by themselves."""
    envelope = encode_envelope(segments)
    head = _PREFIX.pack(len(envelope), len(payload)) + envelope
    return head, payload + _TRAILER.pack(make_frame(segments, payload).checksum, True)
