"""Loading: cached blocks come into the engine's memory in a thread of their own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from kvferry.cluster.client_lease import Lease
from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.orders import HeldPrefix, LoadOrder
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.proto.errors import KvferryError
from kvferry.proto.step_messages import Source

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How a load ended: nothing writes into its blocks any more; `failed_ids` have wrong bytes."""

    request_id: str
    failed_ids: frozenset[int]


class Loader:
    """Thread-safe. Every order ends exactly once, in `take_ended`, whatever happens to it.

    What comes is leased meanwhile, and counts only if the lease lasted: after a reset it has not.

    Args:
        link: what fetches.
        store: keeps what is fetched in place, wherever that is.
        timeout_s: time for each order, waiting for others not counted.
    """

    def __init__(self, link: RankLink, store: EngineStore, timeout_s: float) -> None:
        self._link = link
        self._store = store
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._orders: deque[_Loading] = deque()
        self._cancels: dict[str, threading.Event] = {}
        self._ended: list[Loaded] = []
        self._stopped = False
        self.num_loaded_blocks = 0
        self.num_failed_loads = 0
        self._placer = ThreadPoolExecutor(1, thread_name_prefix="kvferry-place")
        self._thread = threading.Thread(target=self._run, name="kvferry-load", daemon=True)
        self._thread.start()

    def submit(self, orders: Sequence[LoadOrder]) -> None:
        """Take orders; each request has one at a time. The engine's thread calls this."""
        unused = self._link.queued()
        with self._changed:
            for order in orders:
                loading = _Loading(order, unused)
                self._cancels[order.request_id] = loading.cancel
                self._orders.append(loading)
            self._changed.notify_all()

    def cancel(self, request_ids: frozenset[str]) -> None:
        """Give up the loads of these requests; they end soon."""
        with self._changed:
            for request_id in request_ids:
                if request_id in self._cancels:
                    self._cancels[request_id].set()

    def take_ended(self, *, wait_s: float = 0.0) -> list[Loaded]:
        """Return the loads that ended, each once; wait for one if there are others under way."""
        with self._changed:
            if wait_s and self._cancels:
                self._changed.wait_for(lambda: self._ended, timeout=wait_s)
            ended, self._ended = self._ended, []
            return ended

    def stop(self) -> None:
        """Cancel everything and stop."""
        with self._changed:
            self._stopped = True
            for cancel in self._cancels.values():
                cancel.set()
            self._changed.notify_all()
        self._thread.join(timeout=self._timeout_s)
        self._placer.shutdown(wait=False)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._stopped)
                if not self._orders:
                    return
                loading = self._orders.popleft()
            order, loading.end_s = loading.order, time.monotonic() + self._timeout_s
            try:
                for holder in order.holders:
                    if not loading.goes_on():
                        break
                    self._load_from(loading, holder)
            except Exception:
                # The request waits for this load; whatever went wrong, it must hear of the end.
                _log.exception("the load of %s failed", order.request_id)
                loading.num_done = 0
            self._end(order, loading.num_done)

    def _end(self, order: LoadOrder, num_loaded: int) -> None:
        facts = self._link.facts
        loaded_tokens = (order.first_block + num_loaded) * facts.hash_block_tokens
        num_good = max(loaded_tokens // facts.engine_block_tokens - order.blocks.first, 0)
        failed = frozenset(order.blocks.ids[num_good:])
        with self._changed:
            self.num_loaded_blocks += num_loaded
            self.num_failed_loads += bool(failed)
            del self._cancels[order.request_id]
            self._ended.append(Loaded(request_id=order.request_id, failed_ids=failed))
            self._changed.notify_all()

    def _load_from(self, loading: "_Loading", holder: HeldPrefix) -> None:
        """Load what is missing and a holder has; what it does not give is logged."""
        hashes = loading.order.chain[: min(loading.order.end_block, holder.num_blocks)]
        num_before = loading.num_done
        try:
            with self._store.lease(
                self._link.facts.identity, hashes, holder.source.instance_id, loading.left_s()
            ) as lease:
                self._read(loading, lease, holder.source)
                self._pull(loading, lease, holder.source)
                if loading.num_done > num_before and not lease.has_lasted():
                    loading.num_done = num_before
                    _log.warning("what %s gave may be old", holder.source.instance_id)
        except KvferryError as error:
            _log.warning("%s gave nothing: %s", holder.source.instance_id, error)

    def _read(self, loading: "_Loading", lease: Lease, source: Source) -> None:
        """Copy straight out of the holder's memory what can be; the rest is pulled."""
        first, end = loading.next_block, self._end_block(loading, lease)
        if first < end:
            loading.num_done += self._link.read(
                loading.order.chain[first:end],
                first,
                lease.source or source,
                loading.order.blocks,
                unused=loading.unused,
                timeout_s=loading.left_s(),
                cancel=loading.cancel,
            )

    def _pull(self, loading: "_Loading", lease: Lease, source: Source) -> None:
        """Pull into one tray while the engine's memory is filled from the other."""
        unit = self._link.facts.hashes_per_block
        end_block = self._end_block(loading, lease)
        first, tray = loading.next_block, 0
        with closing(_InTurn(self._placer)) as placing:
            while first < end_block:
                wanted = min(self._link.num_tray_slots, end_block - first)
                outcome = self._link.pull(
                    loading.order.chain,
                    first,
                    wanted,
                    lease.source or source,
                    tray=tray,
                    timeout_s=loading.left_s(),
                    cancel=loading.cancel,
                )
                arrived = outcome.num_blocks_of_run[0] // unit * unit
                if arrived:
                    placing.begin(partial(self._place, loading, arrived, first, tray))
                if arrived < wanted:
                    _log.warning(
                        "%s gave %d of %d blocks: %s",
                        source.instance_id,
                        arrived,
                        wanted,
                        outcome.error,
                    )
                    return
                first, tray = first + arrived, 1 - tray

    def _end_block(self, loading: "_Loading", lease: Lease) -> int:
        unit = self._link.facts.hashes_per_block
        return min(loading.order.end_block, lease.num_blocks // unit * unit)

    def _place(self, loading: "_Loading", num_blocks: int, first_block: int, tray: int) -> None:
        loading.unused()
        self._link.take_out(num_blocks, first_block, loading.order.blocks, tray=tray)
        loading.num_done += num_blocks


class _InTurn:
    """Pieces of work in another thread, one after the other."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin with a piece when the last one is done; what that failed with is raised."""
        self.close()
        self._work = self._thread.submit(work)

    def close(self) -> None:
        """Wait for the last piece; what it failed with is raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


@dataclass(slots=True)
class _Loading:
    """An order under way; `num_done` of its first hash blocks are in the engine's memory.

    `unused` waits until the engine's device does nothing any more with what its blocks held.
    """

    order: LoadOrder
    unused: Callable[[], None]
    cancel: threading.Event = field(default_factory=threading.Event)
    end_s: float = 0.0
    num_done: int = 0

    @property
    def next_block(self) -> int:
        return self.order.first_block + self.num_done

    def left_s(self) -> float:
        # Nothing may be asked for no time at all.
        return max(self.end_s - time.monotonic(), 0.001)

    def goes_on(self) -> bool:
        is_in_time = time.monotonic() < self.end_s
        return self.next_block < self.order.end_block and is_in_time and not self.cancel.is_set()
