"""What a worker's front is told by clients: its handlers, called without a network."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NoReturn, cast

import grpc
from tests.fuzz.mutating import altered, damaged, disordered
from tests.integration.transfer_peer import PeerService, content_of, fill, hash_of, new_worker
from tests.tampering import as_received, make_frame

from kvferry.proto.errors import BusyError, NotFoundError, UnavailableError
from kvferry.proto.grpc_status import ERROR_METADATA_KEY
from kvferry.proto.ids import (
    FIRST_GROUP,
    BlockHash,
    BlockId,
    GroupId,
    InstanceId,
    LeaseId,
    pack_group,
)
from kvferry.proto.layout import Layout
from kvferry.proto.step_messages import Source
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.block_io import gather
from kvferry.worker.destination import Destination
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frame_wire import encode_frame
from kvferry.worker.frames import Frame, Place, plan_frames
from kvferry.worker.paths import this_place
from kvferry.worker.pull import receive
from kvferry.worker.reservations import Reservation
from kvferry.worker.selection import Selection, StridedRuns
from kvferry.worker.take_wire import TakeAsk, make_take_ask, take_ask_to_proto
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_server import _Handlers
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    FetchAsk,
    decode_reply,
    encode_store_header,
    fetch_ask_to_proto,
    make_fetch_ask,
    make_store_ask,
)

NUM_BLOCKS = 8
SIZES: dict[str, Any] = {"num_blocks": NUM_BLOCKS + 1, "num_layers": 2, "head_size": 8}
BLOCK_BYTES = 2 * 16 * 8
HASHES = [hash_of(index) for index in range(NUM_BLOCKS)]
CONTENT = {block_hash: content_of(index, BLOCK_BYTES) for index, block_hash in enumerate(HASHES)}
MAX_TRANSFERS = 2
ADDRESS = "127.0.0.1:1"
"""Of the worker that holds everything, to those that are told to take from it."""


class RefusedError(Exception):
    """A handler has ended its call with a status."""


class CallerContext:
    """What a handler sees of a caller that waits for it."""

    def __init__(self) -> None:
        self.error_type = ""

    def time_remaining(self) -> float:
        return 10.0

    def is_active(self) -> bool:
        return True

    def add_callback(self, _: Callable[[], None]) -> bool:
        return True

    def peer(self) -> str:
        return "fuzz"

    def cancel(self) -> None:
        raise AssertionError("a handler stalled")

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        ((key, encoded),) = metadata
        assert key == ERROR_METADATA_KEY
        self.error_type = json.loads(encoded)["type"]

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        assert self.error_type != "InvariantError", details
        assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
        raise RefusedError


class Reserving:
    """Lends the blocks of a store one reservation at a time, and takes them back."""

    def __init__(self) -> None:
        self.is_open = False

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        assert not self.is_open, "the reservation before this one was not ended"
        if len(hashes) > NUM_BLOCKS:
            raise BusyError("no room", given=len(hashes), allowed=NUM_BLOCKS)
        self.is_open = True
        block_ids = [BlockId(1 + index) for index in range(len(hashes))]
        return Reservation(reservation_id=LeaseId("r"), block_ids=block_ids)

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        self.is_open = False


class ClientOfOne(TransferClient):
    """Reaches nobody but one worker, without a network."""

    def __init__(self, source: PeerService) -> None:
        super().__init__(paths=())
        self._source = source

    def fetch(
        self,
        peer: Peer,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        if peer.address != ADDRESS:
            raise UnavailableError("nobody answers", given=peer.address)
        messages = as_received(self._source.open_fetch(ask))
        receive(messages, session, lambda one: destination.write(one.segments, one.payload))
        if session.num_found < session.num_asked:
            raise NotFoundError("holds only the first", given=session.num_found)


class Front:
    """The handlers of a worker that holds all of `HASHES`, and of one that takes stores."""

    def __init__(self) -> None:
        self.source = new_worker(1, **SIZES, paths=["shm"])
        fill(self.source)
        self.source.serve()
        self.store = new_worker(1, **SIZES)
        self.reserving = Reserving()
        self.store.reserver = self.reserving
        self.store._fetcher.close()
        self.store._fetcher = ClientOfOne(self.source)
        self._fetching = _Handlers(self.source, None, MAX_TRANSFERS, 60.0)
        self._storing = _Handlers(self.store, None, MAX_TRANSFERS, 60.0)
        self._asks = [fetch_ask_to_proto(ask) for ask in fetch_asks(self.source)]
        self._stored = store_messages(self.store)
        self._takes = [take_ask_to_proto(ask) for ask in take_asks(self.source)]

    def stop(self) -> None:
        self.source.stop()
        self.store.stop()

    def fetch(self, random: Random) -> None:
        """Send one damaged Fetch; bytes that come back must be those of the asked blocks."""
        ask = random.choice(self._asks)
        request = altered(random, ask)
        if random.random() < 0.5:
            request = damaged(random, request)
        replies = answered(
            lambda context: self._fetching._fetch(request, cast("grpc.ServicerContext", context))
        )
        for reply in map(decode_reply, replies):
            if isinstance(reply, Frame):
                require_right(request, reply)

    def put(self, random: Random) -> None:
        """Send one damaged Store; only verified bytes may be held afterwards."""
        messages = disordered(random, self._stored)
        if messages and random.random() < 0.8:
            at = random.randrange(len(messages))
            parsed = transfer_pb2.StoreRequest.FromString(messages[at])
            how = random.choice(("alter", "damage"))
            messages[at] = (
                altered(random, parsed) if how == "alter" else damaged(random, messages[at])
            )
        answered(
            lambda context: iter(
                [self._storing._store(iter(messages), cast("grpc.ServicerContext", context))]
            )
        )
        assert not self.reserving.is_open

    def take(self, random: Random) -> None:
        """Send one damaged Take; what the store holds afterwards is right."""
        request = altered(random, random.choice(self._takes))
        if random.random() < 0.5:
            request = damaged(random, request)
        answered(
            lambda context: iter(
                [self._storing._take(request, cast("grpc.ServicerContext", context))]
            )
        )
        assert not self.reserving.is_open
        (group,) = self.store.memory.groups
        for block_hash, content in CONTENT.items():
            held = self.store.residency.find(pack_group(block_hash, FIRST_GROUP))
            assert held is None or gather(group, [Place(held.block_id, 0, 2)]) == content

    def describe(self, random: Random) -> None:
        request = damaged(random, b"\x0a\x01x")
        answered(
            lambda context: iter(
                [self._fetching._describe(request, cast("grpc.ServicerContext", context))]
            )
        )

    def require_as_before(self) -> None:
        """Every place is free, no reservation is open, and a good fetch and store work."""
        for handlers in (self._fetching, self._storing):
            taken = [handlers._places.acquire(blocking=False) for _ in range(MAX_TRANSFERS)]
            assert taken == [True] * MAX_TRANSFERS
            for _ in taken:
                handlers._places.release()
        request = self._asks[0].SerializeToString()
        take = self._takes[0].SerializeToString()
        context = cast("grpc.ServicerContext", CallerContext())
        parts = [decode_reply(reply) for reply in self._fetching._fetch(request, context)]
        assert b"".join(bytes(part.payload) for part in parts if isinstance(part, Frame)) == (
            b"".join(CONTENT.values())
        )
        assert self._storing._take(take, context).num_stored == NUM_BLOCKS
        self.store.reused(BlockId(1 + index) for index in range(NUM_BLOCKS))
        assert self._storing._store(iter(self._stored), context).num_stored == NUM_BLOCKS
        (group,) = self.store.memory.groups
        for index, content in enumerate(CONTENT.values()):
            assert gather(group, [Place(BlockId(1 + index), 0, 2)]) == content
        assert gather(group, [Place(BlockId(0), 0, 2)]) == bytes(BLOCK_BYTES)


def answered(call: Callable[[Any], Iterator[Any]]) -> list[Any]:
    """Return the replies that came before the end of a call, whatever the end was."""
    replies: list[Any] = []
    try:
        for reply in call(CallerContext()):
            replies.append(reply)
    except RefusedError:
        pass
    return replies


def require_right(request: bytes, frame: Frame) -> None:
    """Refuse a frame of whole blocks with other bytes than those its hashes stand for."""
    asked = transfer_pb2.FetchRequest.FromString(request)
    assert make_frame(frame.segments, bytes(frame.payload)).checksum == frame.checksum
    if asked.HasField("selection"):
        return
    for segment in frame.segments:
        begin = segment.hash_index * asked.hash_bytes
        content = CONTENT[BlockHash(asked.hashes[begin : begin + asked.hash_bytes])]
        page_bytes = BLOCK_BYTES // 2
        assert (
            frame.payload[segment.offset : segment.offset + segment.length]
            == content[segment.layer_start * page_bytes : segment.layer_end * page_bytes]
        )


def fetch_asks(worker: PeerService) -> list[FetchAsk]:
    """Good asks, which together use every field."""
    selection = Selection(
        layers=range(2),
        heads=range(1),
        runs=(StridedRuns(first=0, run_tokens=2, loops=((4, 4),)),),
    )
    return [
        make_fetch_ask(worker.identity, HASHES),
        make_fetch_ask(worker.identity, HASHES[:5], max_frame_bytes=300, incarnation=1),
        make_fetch_ask(worker.identity, HASHES, selection=selection, lease_id="l"),
        make_fetch_ask(
            worker.identity, HASHES, layout=worker.memory.layout, rank=0, max_frame_bytes=100
        ),
        FetchAsk(
            identity_digest=worker.identity.digest(),
            identity_cbor=b"",
            group_id=GroupId(0),
            hashes=tuple(HASHES[2:]),
            paths=("shm", "bulk"),
            place=this_place(),
        ),
    ]


def take_asks(worker: PeerService) -> list[TakeAsk]:
    """Good asks of which the worker has everything, or a part; and one of other ranks."""
    own = Source(
        instance_id=InstanceId("source"),
        incarnation=worker.incarnation,
        layout=worker.memory.layout,
        rank_addresses=(ADDRESS,),
    )
    dealt = replace(own, layout=Layout(block_tokens=1, dcp=2), rank_addresses=(ADDRESS,) * 2)
    hashes = [*HASHES[1:3], hash_of(NUM_BLOCKS)]
    return [
        make_take_ask(
            worker.identity, asked, group_id=FIRST_GROUP, first_block=first, source=source
        )
        for asked, first, source in ((HASHES, 0, own), (hashes, 1, own), (HASHES, 5, dealt))
    ]


def store_messages(worker: PeerService) -> list[bytes]:
    """A good Store of all blocks, one in each frame."""
    geometry = worker.memory.groups[0].geometry
    ask = make_store_ask(worker.identity, HASHES, geometry)
    messages = [encode_store_header(ask)]
    for segments in plan_frames(NUM_BLOCKS, geometry, BLOCK_BYTES):
        payload = content_of(segments[0].hash_index, BLOCK_BYTES)
        messages.append(encode_frame(segments, make_frame(segments, payload).checksum, [payload]))
    return messages
