"""Follows the KV events of one publisher over ZeroMQ: kvferry's, or vLLM's from 0.17 on.

A consumer that starts late, falls behind, loses messages or outlives the publisher asks for a
replay. What no replay brings back is reported as `Lost`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvferry.cluster.kv_events_held import HeldBlocks
from kvferry.cluster.kv_events_sequence import EventSequence, Restarted, Update
from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.kv_events_endpoint import require_safe_endpoint
from kvferry.proto.kv_events_frames import read_live, read_replay, seq_to_bytes

# Messages taken before the updates are returned, so that a flood does not hold the caller.
MESSAGES_PER_POLL = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberSettings:
    """Whom to follow.

    `bind`: listen at `endpoint` for publishers that connect (loopback only, unless `insecure`).
    `topic` must be equal to the publisher's, not only its beginning.
    `gap_wait_s`: how long a gap may stay open, or a replay be silent, before it is given up.
    `check_every_s`: after so long without news a replay is asked for, since the last message of
    all may have been lost and a restarted publisher may have nothing to say. It must be
    remembering at least one batch.
    `receive_batches` may wait unread here.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool = False
    insecure: bool = False
    gap_wait_s: float = 2.0
    check_every_s: float = 5.0
    receive_batches: int = 100_000


class KvEventsSubscriber:
    """A single-threaded reader: `poll` in a loop, from the thread that made it.

    `held` is what the instance has, as far as is known. `endpoint` is where it listens (with the
    port that the system chose) or what it is connected to.

    Raises:
        InsecureBindError: `bind` beyond loopback without `insecure`.
        ConfigError: an endpoint that cannot be used.
    """

    def __init__(
        self, settings: SubscriberSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._topic = settings.topic.encode()
        self._clock = clock
        self._sequence = EventSequence()
        self.held = HeldBlocks()
        self.refused_messages = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._replay: _Replay | None = None
        self._gap_since: float | None = None
        self._sub = self._open()
        self.endpoint = self._sub.getsockopt_string(zmq.LAST_ENDPOINT)
        # What was published before this reader came.
        self._check_at = clock()

    def poll(self, timeout_s: float) -> list[Update]:
        """Return what became known, waiting up to `timeout_s` for the first of it."""
        deadline = self._clock() + timeout_s
        while True:
            self._ask_if_due()
            wait_s = max(0.0, min(self._next_timer(), deadline) - self._clock())
            updates = [*self._take(wait_s), *self._take_timeouts()]
            for update in updates:
                self.held.apply(update)
            if updates or self._clock() >= deadline:
                return updates

    def close(self) -> None:
        """Close the sockets. Repeating is fine."""
        self._sub.close(linger=0)
        self._end_replay()

    def _open(self) -> "zmq.Socket[bytes]":
        endpoint = self._settings.endpoint
        if self._settings.bind:
            require_safe_endpoint(endpoint, self._settings.insecure)
        made = self._context.socket(zmq.SUB)
        made.rcvhwm = self._settings.receive_batches
        made.ipv6 = "[" in endpoint
        made.subscribe(self._topic)
        try:
            if self._settings.bind:
                made.bind(endpoint)
            else:
                made.connect(endpoint)
        except zmq.ZMQError as error:
            made.close(linger=0)
            raise ConfigError(
                f"an endpoint of KV events cannot be used: {error}",
                given=endpoint,
                allowed="tcp://host:port, ipc://path",
            ) from error
        return made

    def _ask_if_due(self) -> None:
        endpoint = self._settings.replay_endpoint
        if endpoint is None or self._replay is not None:
            return
        now = self._clock()
        if self._sequence.has_gap or now >= self._check_at:
            self._check_at = now + self._settings.check_every_s
            self._replay = _Replay(self._context, endpoint, self._sequence, now)

    def _next_timer(self) -> float:
        """Return when something has to be done even if nothing arrives."""
        wait_s = self._settings.gap_wait_s
        if self._replay is not None:
            return self._replay.heard_at + wait_s
        if self._gap_since is not None:
            return self._gap_since + wait_s
        return float("inf") if self._settings.replay_endpoint is None else self._check_at

    def _take(self, wait_s: float) -> list[Update]:
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay.socket, zmq.POLLIN)
        # Rounded up, so that a timer has passed when the wait for it is over.
        poller.poll(int(wait_s * 1000) + 1)
        updates: list[Update] = []
        for _ in range(MESSAGES_PER_POLL):
            if (frames := _receive(self._sub)) is None:
                break
            updates += self._take_live(frames)
        for _ in range(MESSAGES_PER_POLL):
            if self._replay is None or (frames := _receive(self._replay.socket)) is None:
                break
            updates += self._take_replayed(self._replay, frames)
        if not self._sequence.has_gap:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = self._clock()
        return updates

    def _take_live(self, frames: list[bytes]) -> list[Update]:
        try:
            message = read_live(frames)
        except BadInputError:
            self.refused_messages += 1
            return []
        if message.topic != self._topic:
            return []
        self._check_at = self._clock() + self._settings.check_every_s
        return self._begin_again_if_restarted(self._sequence.live(message.seq, message.payload))

    def _take_replayed(self, replay: "_Replay", frames: list[bytes]) -> list[Update]:
        replay.heard_at = self._clock()
        try:
            message = read_replay(frames)
        except BadInputError:
            self.refused_messages += 1
            return []
        if message is None:
            self._end_replay()
            return self._take_end(replay)
        if message.topic not in (None, self._topic):
            return []
        replay.num_batches += 1
        return self._begin_again_if_restarted(self._sequence.replayed(message.seq, message.payload))

    def _take_end(self, replay: "_Replay") -> list[Update]:
        if replay.num_batches == 0 and (restarted := self._sequence.replay_was_empty()):
            return self._begin_again_if_restarted(restarted)
        # A gap for which the replay had nothing stays one. If there is still a gap, but another,
        # it began after the replay, and is asked for next.
        if replay.for_gap and self._sequence.next_seq == replay.next_seq:
            return self._sequence.give_up_gap()
        return []

    def _begin_again_if_restarted(self, updates: list[Update]) -> list[Update]:
        """Return the updates; after a restart, begin again: old replies are void."""
        if any(isinstance(update, Restarted) for update in updates):
            self._end_replay()
            self._check_at = self._clock()
        return updates

    def _take_timeouts(self) -> list[Update]:
        replay = self._replay
        oldest = replay.heard_at if replay is not None else self._gap_since
        if oldest is None or self._clock() < oldest + self._settings.gap_wait_s:
            return []
        self._end_replay()
        self._gap_since = None
        # A gap that is younger than the request has not been asked for yet.
        return self._sequence.give_up_gap() if replay is None or replay.for_gap else []

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.socket.close(linger=0)
            self._replay = None


class _Replay:
    """One request on a socket of its own, so that belated replies to an earlier one are gone."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        sequence: EventSequence,
        now: float,
    ) -> None:
        self.next_seq = sequence.next_seq
        self.for_gap = sequence.has_gap
        self.heard_at = now
        self.num_batches = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.ipv6 = "[" in endpoint
        # Replies that have been asked for are never too many.
        self.socket.rcvhwm = 0
        self.socket.connect(endpoint)
        self.socket.send_multipart([b"", seq_to_bytes(sequence.replay_from)], zmq.NOBLOCK)


def _receive(source: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
