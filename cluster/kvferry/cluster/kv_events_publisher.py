"""Publishes the KV events of one instance over ZeroMQ, so that any reader of vLLM's understands.

`publish` numbers a batch and puts it into a bounded queue; one thread encodes, sends, and answers
requests for a replay from the batches it remembers. Nothing that a reader does or leaves undone
can hold up the producer: where the queue is full the batch is dropped, and since its number is
used up all the same, every reader sees the gap.

A gap that no replay closes is closed by a **snapshot**, which is an ordinary batch: first
`AllBlocksCleared`, then `BlockStored` for all that is findable now. `snapshot_wanted` says when.
"""

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, get_args

import zmq

from kvferry.proto.errors import BadInputError, ConfigError, PortTakenError, UnavailableError
from kvferry.proto.kv_events import KvEvent, KvEventBatch
from kvferry.proto.kv_events_codec import EventEncoding, encode_batch
from kvferry.proto.kv_events_endpoint import binds_by_vllm_rule, require_safe_endpoint
from kvferry.proto.kv_events_frames import (
    ReplayForm,
    end_frames,
    live_frames,
    replay_frames,
    seq_from_bytes,
)

log = logging.getLogger(__name__)

# Batches sent between two looks at the replay socket.
BATCHES_PER_TURN = 64
IDLE_WAIT_S = 1.0
CLOSE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """How the events of one instance are published; the numbers are vLLM's.

    `endpoint` and `replay_endpoint` are `tcp://host:port` (`*` as the port: the system chooses),
    `ipc://` or `inproc://`. The replay endpoint always listens; without one there are no replays.
    `bind`: listen at `endpoint` (True), connect to a reader that listens there (False), or go by
    vLLM's rule (None). Beyond loopback only `insecure` may listen.
    `buffer_batches` are remembered for replays, `queue_batches` may wait for the thread, and
    `send_batches` for a slow reader.
    """

    endpoint: str = "tcp://127.0.0.1:*"
    replay_endpoint: str | None = "tcp://127.0.0.1:*"
    topic: str = ""
    bind: bool | None = None
    insecure: bool = False
    encoding: EventEncoding = "map"
    replay_form: ReplayForm = "topic"
    data_parallel_rank: int = 0
    buffer_batches: int = 10_000
    queue_batches: int = 100_000
    send_batches: int = 100_000

    def __post_init__(self) -> None:
        for name, kind in (("encoding", EventEncoding), ("replay_form", ReplayForm)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"unknown {name} of KV events",
                    given=getattr(self, name),
                    allowed=list(get_args(kind)),
                )
        for name in ("buffer_batches", "queue_batches", "send_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be positive", given=getattr(self, name), allowed=">= 1"
                )

    @property
    def listens(self) -> bool:
        """Whether the publisher listens at `endpoint`."""
        return binds_by_vllm_rule(self.endpoint) if self.bind is None else self.bind


class PublisherCounters(NamedTuple):
    """Totals since the start. Dropped and failed batches are gaps in the sequence."""

    published_batches: int
    dropped_batches: int
    failed_batches: int
    replays: int
    refused_requests: int


class _Waiting(NamedTuple):
    seq: int
    ts: float
    events: tuple[KvEvent, ...]


class KvEventsPublisher:
    """A running publisher from construction to `close`; any thread may call it.

    Args:
        settings: where and how.
        clock: seconds since 1970, the `ts` of the batches.

    Raises:
        InsecureBindError: an endpoint to listen at is not loopback and `insecure` is False.
        PortTakenError: another process listens there.
        ConfigError: an endpoint that this machine cannot use.
    """

    def __init__(
        self, settings: PublisherSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._next_seq = 0
        self._closing = False
        self._snapshot_wanted = False
        self._published = self._dropped = self._failed = self._replays = self._refused = 0
        self._sender = _Sender(settings)
        self.endpoint = self._sender.endpoint
        self.replay_endpoint = self._sender.replay_endpoint
        # A byte on this pair ends the thread's wait; ZeroMQ's own sockets belong to one thread.
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvferry-kv-events")
        self._thread.start()

    def publish(self, events: tuple[KvEvent, ...]) -> bool:
        """Queue the events of one step as the next batch; without events there is no batch.

        Never waits for a reader, a socket or the encoding.

        Returns:
            False if the queue was full: the batch is dropped and a snapshot wanted.

        Raises:
            UnavailableError: the publisher is closed.
        """
        if not events:
            return True
        with self._lock:
            if self._closing:
                raise UnavailableError("the publisher of KV events is closed")
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            if len(self._queue) >= self._settings.queue_batches:
                self._dropped += 1
                self._snapshot_wanted = True
                return False
            self._queue.append(_Waiting(seq, self._clock(), events))
            was_idle = len(self._queue) == 1
        if was_idle:
            self._wake_up()
        return True

    def snapshot_wanted(self) -> bool:
        """Return once whether readers miss what no replay can bring back.

        That is after a dropped or failed batch, and after a request for a replay that begins
        before the oldest remembered batch. The owner should then publish a snapshot, when and as
        often as it sees fit; if that is dropped in turn, this is True again.
        """
        with self._lock:
            wanted, self._snapshot_wanted = self._snapshot_wanted, False
        return wanted

    def counters(self) -> PublisherCounters:
        """Return the totals so far."""
        with self._lock:
            return PublisherCounters(
                self._published, self._dropped, self._failed, self._replays, self._refused
            )

    def close(self) -> None:
        """Send what is queued, for at most `CLOSE_WAIT_S`, drop the rest and stop.

        Repeating is fine.
        """
        with self._lock:
            self._closing = True
        self._wake_up()
        self._thread.join(CLOSE_WAIT_S)
        with self._lock:
            self._dropped += len(self._queue)
            self._queue.clear()
        self._thread.join(CLOSE_WAIT_S)

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            # Full: the thread is woken already. Closed: the thread has ended.
            return

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._sender.close()
            self._wake.close()
            self._woken.close()

    def _turn(self) -> bool:
        """Answer at most one request and send some batches; return whether to go on."""
        with self._lock:
            busy = bool(self._queue)
            if self._closing and not busy:
                return False
        request = self._sender.wait(self._woken, 0.0 if busy else IDLE_WAIT_S)
        if request is not None:
            self._answer(request)
        with self._lock:
            num_taken = min(len(self._queue), BATCHES_PER_TURN)
            taken = [self._queue.popleft() for _ in range(num_taken)]
        sent = [self._send(waiting) for waiting in taken]
        with self._lock:
            self._published += sum(sent)
            self._failed += len(sent) - sum(sent)
            self._snapshot_wanted |= not all(sent)
        return True

    def _send(self, waiting: _Waiting) -> bool:
        """Encode and send one batch; a batch that cannot be sent is a gap, not the end."""
        batch = KvEventBatch(
            ts=waiting.ts,
            events=waiting.events,
            data_parallel_rank=self._settings.data_parallel_rank,
        )
        try:
            self._sender.send(waiting.seq, encode_batch(batch, self._settings.encoding))
        except (BadInputError, zmq.ZMQError):
            log.exception("batch %d of topic %r is lost", waiting.seq, self._settings.topic)
            return False
        return True

    def _answer(self, request: list[bytes]) -> None:
        try:
            reader, first_seq = _read_request(request)
        except BadInputError as error:
            log.warning("a request for a replay of KV events is refused: %s", error)
            with self._lock:
                self._refused += 1
            return
        with self._lock:
            self._replays += 1
            self._snapshot_wanted |= self._sender.has_forgotten(first_seq)
        try:
            self._sender.replay(reader, first_seq)
        except zmq.ZMQError:
            # The reader will ask again; the events of all others go on.
            log.exception("a replay of KV events has failed")


class _Sender:
    """The sockets and the remembered batches; after construction one thread's own."""

    def __init__(self, settings: PublisherSettings) -> None:
        self._topic = settings.topic.encode()
        self._form = settings.replay_form
        self._remembered: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_batches)
        self.replay_endpoint: str | None = None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self._pub.sndhwm = settings.send_batches
        # A whole replay and its end fit; a ROUTER silently drops what does not.
        self._router.sndhwm = settings.buffer_batches + 1
        self._pub.linger = self._router.linger = int(CLOSE_WAIT_S * 1000)
        try:
            attach = _listen if settings.listens else _connect
            self.endpoint = attach(self._pub, settings.endpoint, settings.insecure)
            if settings.replay_endpoint is not None:
                self.replay_endpoint = _listen(
                    self._router, settings.replay_endpoint, settings.insecure
                )
        except BaseException:
            self.close()
            raise

    def wait(self, woken: socket.socket, timeout_s: float) -> list[bytes] | None:
        """Return a request for a replay, or None when there is none yet or `woken` is readable."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(woken, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        if woken.fileno() in ready:
            woken.recv(1024)
        return self._router.recv_multipart(zmq.NOBLOCK) if self._router in ready else None

    def send(self, seq: int, payload: bytes) -> None:
        """Send to all readers, dropping it for those with too much unread, and remember it."""
        self._pub.send_multipart(live_frames(self._topic, seq, payload), zmq.NOBLOCK)
        self._remembered.append((seq, payload))

    def has_forgotten(self, first_seq: int) -> bool:
        """Return whether a replay from `first_seq` on begins too late."""
        return bool(self._remembered) and first_seq < self._remembered[0][0]

    def replay(self, reader: bytes, first_seq: int) -> None:
        """Send what is remembered from `first_seq` on to one reader, and the end."""
        for seq, payload in self._remembered:
            if seq >= first_seq:
                self._reply(reader, replay_frames(self._form, self._topic, seq, payload))
        self._reply(reader, end_frames(self._form))

    def _reply(self, reader: bytes, frames: list[bytes]) -> None:
        self._router.send_multipart([reader, *frames], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets; what was sent still goes out, for at most `CLOSE_WAIT_S`."""
        self._pub.close()
        self._router.close()


def _read_request(frames: list[bytes]) -> tuple[bytes, int]:
    """Return who asks, and from which number on.

    Raises:
        BadInputError: the request is not `[identity] [] [seq]`.
    """
    if len(frames) != 3 or frames[1]:
        raise BadInputError(
            "a wrong form", given=f"{len(frames)} frames", allowed="[] and the first number"
        )
    return frames[0], seq_from_bytes(frames[2])


def _listen(made: zmq.Socket[bytes], endpoint: str, insecure: bool) -> str:
    """Bind, and return the endpoint with the port that the system chose."""
    require_safe_endpoint(endpoint, insecure)
    made.ipv6 = "[" in endpoint
    try:
        made.bind(endpoint)
    except zmq.ZMQError as error:
        raise _bad_endpoint(endpoint, error) from error
    return made.getsockopt_string(zmq.LAST_ENDPOINT)


def _connect(made: zmq.Socket[bytes], endpoint: str, _insecure: bool) -> str:
    """Connect, now or whenever somebody listens there."""
    made.ipv6 = "[" in endpoint
    try:
        made.connect(endpoint)
    except zmq.ZMQError as error:
        raise _bad_endpoint(endpoint, error) from error
    return endpoint


def _bad_endpoint(endpoint: str, error: zmq.ZMQError) -> ConfigError | PortTakenError:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            "another process listens at the endpoint", given=endpoint, allowed="a free port"
        )
    return ConfigError(
        f"an endpoint for KV events cannot be used: {error}",
        given=endpoint,
        allowed="an address of this machine to listen at, or of a reader to connect to",
    )
