"""What the scheduler half asks of the service, always in threads of its own.

The engine's scheduler waits for nothing here: it asks whether an answer has come.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.orders import HeldPrefix
from kvferry.cluster.connectors.prefixes import NOTHING, Prefix
from kvferry.proto.errors import KvferryError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import BlockHash

_R = TypeVar("_R")

_log = logging.getLogger(__name__)

NUM_THREADS = 4
NUM_KEEPERS = 2
# After a failure nobody is asked for so long: every request would wait for the same timeout.
PAUSE_AFTER_FAILURE_S = 1.0
KEEP_POLL_S = 0.05
KEEP_WAIT_S = 10.0


class ServiceLink:
    """`Prefixes` over the service behind an engine's store. Thread-safe.

    Args:
        store: answers within its deadline, or nothing is found. Its owner closes it.
        identity: the engine's.
    """

    def __init__(self, store: EngineStore, identity: Identity) -> None:
        self._store = store
        self._identity = identity
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvferry-ask")
        # These wait for a while; no request does for them.
        self._keepers = ThreadPoolExecutor(NUM_KEEPERS, thread_name_prefix="kvferry-keep")
        self._answered = threading.Condition()
        self._not_before_s = 0.0
        self._is_closed = False
        self.num_failed = 0

    @property
    def is_away(self) -> bool:
        """True for a moment after the service did not answer."""
        return time.monotonic() < self._not_before_s

    def look_up(self, hashes: Sequence[BlockHash]) -> "Future[Prefix]":
        """Ask who holds the longest prefix; a failure is an answer too: `NOTHING`."""
        if self.is_away:
            return _now(NOTHING)

        def locate() -> Prefix:
            # Those that waited for a thread while others timed out must not time out as well.
            return NOTHING if self.is_away else self._locate(hashes)

        return self._soon(locate, NOTHING)

    def keep_when_stored(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Lease a prefix as soon as the engine's own store has all of it, if it soon has."""

        def keep() -> None:
            end_s = time.monotonic() + KEEP_WAIT_S
            while time.monotonic() < end_s and not (self._is_closed or self.is_away):
                store_id = self._store.store_id
                if store_id is not None and self._locate(hashes).num_stored == len(hashes):
                    # It ends by itself.
                    self._store.lease(self._identity, hashes, store_id, ttl_s)
                    return
                time.sleep(KEEP_POLL_S)

        self._soon(keep, None, self._keepers)

    def reset(self) -> bool:
        """Make everything of the identity unfindable; return whether that is done.

        The one call that waits: an operator does, whose next step depends on it.
        """
        try:
            self._store.reset(self._identity)
        except KvferryError as error:
            _log.error("the cache was not reset: %s", error)
            return False
        return True

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until some answer comes."""
        with self._answered:
            self._answered.wait(timeout_s)

    def close(self) -> None:
        """Ask no more."""
        self._is_closed = True
        for threads in (self._threads, self._keepers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _locate(self, hashes: Sequence[BlockHash]) -> Prefix:
        holders = self._store.holders(self._identity, hashes)
        own = self._store.store_id
        return Prefix(
            holders=tuple(
                HeldPrefix(source=holder.source, num_blocks=holder.num_hashes)
                for holder in holders
                if holder.num_hashes
            ),
            num_stored=sum(
                holder.num_hashes for holder in holders if holder.source.instance_id == own
            ),
        )

    def _soon(
        self, ask: Callable[[], _R], otherwise: _R, threads: ThreadPoolExecutor | None = None
    ) -> "Future[_R]":
        def answer() -> _R:
            try:
                return ask()
            except KvferryError as error:
                self.num_failed += 1
                self._not_before_s = time.monotonic() + PAUSE_AFTER_FAILURE_S
                _log.warning("the service does not answer: %s", error)
                return otherwise

        try:
            future = (threads or self._threads).submit(answer)
        except RuntimeError:  # closed meanwhile
            return _now(otherwise)
        future.add_done_callback(self._tell)
        return future

    def _tell(self, _: object) -> None:
        with self._answered:
            self._answered.notify_all()


def _now(value: _R) -> "Future[_R]":
    future: Future[_R] = Future()
    future.set_result(value)
    return future
