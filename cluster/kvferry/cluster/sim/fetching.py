"""Fetches between simulated workers: frames over a stream, or straight out of a peer's memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvferry.cluster.sim.network import Network, Stream
from kvferry.cluster.sim.world import Process
from kvferry.proto.errors import DeadlineError, InvariantError, NotFoundError, UnavailableError
from kvferry.worker.destination import Destination
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frame_wire import decode_frame, encode_settled
from kvferry.worker.frames import Frame, Header, SharedOffer
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.paths import this_place
from kvferry.worker.peer_memory import PeerMemory, copy_frames, read_shared
from kvferry.worker.pull import receive
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk

STALL_TIMEOUT_S = 5.0
CANCEL_POLL_S = 0.1
HEADER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A worker that listens: its process, and what answers there."""

    process: Process
    service: WorkerService


class FetchClient:
    """In the place of `TransferClient`, for pulls.

    Args:
        network: between the workers.
        served: who listens at which address.
        frame_bytes: small, so that a fetch has several frames.
        shared: how often a fetch goes through shared memory, 0 to 1.
    """

    def __init__(
        self,
        network: Network,
        served: Mapping[str, Served],
        *,
        frame_bytes: int,
        shared: float,
    ) -> None:
        self._network = network
        self._served = served
        self._frame_bytes = frame_bytes
        self._shared = shared

    def fetch(
        self,
        peer: Peer,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        """As `TransferClient.fetch`."""
        terms.require_s()
        source = self._served.get(peer.address)
        if source is None:
            raise UnavailableError(f"nobody listens at {peer.address}")
        ask = replace(ask, max_frame_bytes=self._frame_bytes)
        if self._network.happens(self._shared) and this_place():
            self._copy(source, ask, destination, session, terms)
        else:
            self._receive(source, ask, destination, session, terms)
        if session.num_found < session.num_asked:
            raise NotFoundError(
                f"{peer.address} holds only the first blocks",
                given=session.num_found,
                allowed=session.num_asked,
            )

    def close(self) -> None:
        """Nothing is open between fetches."""

    def _receive(
        self,
        source: Served,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        world = self._network.world
        if not source.process.is_alive:
            world.sleep(self._network.delay_s())
            raise UnavailableError(f"{source.process.name} is gone")
        stream = Stream(self._network, source.process, world.process)
        world.spawn(lambda: stream.send(_sent(source.service, ask)), source.process)
        try:
            messages = self._messages(stream, terms)
            receive(messages, session, lambda one: destination.write(one.segments, one.payload))
        finally:
            stream.close()

    def _messages(self, stream: Stream, terms: FetchTerms) -> Iterator[Header | Frame]:
        world = self._network.world
        moved_s = world.now_s
        while True:
            came, message = stream.take(min(CANCEL_POLL_S, terms.require_s()))
            terms.require_wanted()
            if not came:
                if world.now_s - moved_s > STALL_TIMEOUT_S:
                    raise DeadlineError("the source sent nothing for too long")
                continue
            moved_s = world.now_s
            if message is None:
                return
            yield message if isinstance(message, Header) else self._decoded(message)

    def _decoded(self, message: object) -> Frame:
        if not isinstance(message, bytes):
            raise InvariantError("no message of a fetch", given=type(message).__name__)
        frame = decode_frame(message)
        if frame is None:
            raise InvariantError("a frame that its own reader does not know")
        if self._network.happens(self._network.weather.corrupt):
            payload = bytearray(frame.payload)
            payload[self._network.world.random.randrange(len(payload))] ^= 1
            return replace(frame, payload=bytes(payload))
        return frame

    def _copy(
        self,
        source: Served,
        ask: FetchAsk,
        destination: Destination,
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        shared_ask = replace(ask, paths=("shm",), place=this_place())
        header = self._network.call(
            source.process,
            lambda: next(source.service.open_fetch(shared_ask)),
            timeout_s=min(HEADER_TIMEOUT_S, terms.require_s()),
        )
        if not isinstance(header, Header) or not isinstance(header.offer, SharedOffer):
            raise InvariantError("shared memory was not offered", given=str(header))
        memory = PeerMemory(
            source.service.memory.num_blocks,
            source.service.memory.groups,
            source.service.residency.generations,
        )
        session.open(header)
        frames = read_shared(memory.served(header.offer, ask), ask)
        copy_frames(self._slowly(frames), session, destination, terms)
        session.close()

    def _slowly(self, frames: Iterator[OutgoingFrame]) -> Iterator[OutgoingFrame]:
        for frame in frames:
            self._network.world.sleep(self._network.delay_s())
            yield frame


def _sent(service: WorkerService, ask: FetchAsk) -> Iterator[object]:
    for part in service.open_fetch(ask):
        message: object = part if isinstance(part, Header) else encode_settled(part)
        if message is not None:
            yield message
