"""Saving: finished blocks leave the engine in a thread of their own, in order."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.orders import SaveOrder
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.proto.errors import KvferryError, NotFoundError
from kvferry.proto.ids import BlockHash
from kvferry.proto.step_messages import Source

_log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 10.0
# The engine keeps the blocks of finished requests meanwhile: a store that hangs, or is slower than
# the engine computes, must not take its memory for longer.
SAVE_FOR_S = 30.0
# How long the blocks of other requests wait for one save, once its turn has come.
PATIENCE_S = 5.0
# Other ranks copy the same blocks at about the same time, and wait for rank 0's take. Rank 0 is the
# more patient, so that after a save that failed they are with it again before it gives up the next.
RETRY_PAUSE_S = 0.01
RETRY_FOR_S = 15.0
OTHERS_WAIT_FOR_S = TAKE_TIMEOUT_S


class Saver:
    """Thread-safe.

    Rank 0 of an engine tells the store to take what all ranks have copied; the others keep their
    copies until it has. What cannot be saved is logged and left out: it will be a miss.
    """

    def __init__(self, link: RankLink, store: EngineStore) -> None:
        self._link = link
        self._store = store
        self._changed = threading.Condition()
        self._orders: deque[_Saving] = deque()
        self._current: _Saving | None = None
        self._current_since_s = 0.0
        self._is_copying = False
        self._is_reset_due = False
        self._stopped = False
        self.num_saved_blocks = 0
        self.num_failed_blocks = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-save", daemon=True)
        self._thread.start()

    def submit(self, orders: Sequence[SaveOrder], engine: Source, store_address: str) -> None:
        """Take orders to be carried out after those before; the engine's thread calls this."""
        computed = self._link.queued()
        with self._changed:
            self._orders.extend(_Saving(order, engine, store_address, computed) for order in orders)
            self._changed.notify_all()

    def withdraw(self, overwritten: frozenset[int]) -> None:
        """Give up what is still to be read from these blocks; return when nobody reads them."""
        self._give_up(lambda order: not overwritten.isdisjoint(order.blocks.ids))

    def give_up_late(self) -> None:
        """Give up what waits for a save that has taken longer than `PATIENCE_S`, and its rest."""
        with self._changed:
            taken_s = time.monotonic() - self._current_since_s
            is_late = self._current is not None and taken_s > PATIENCE_S
        if is_late:
            self._give_up(lambda order: True)

    def reset(self) -> None:
        """Give up everything that is not saved yet, and forget what was copied.

        What the store took between the service's reset and this is old too. Rank 0, which had it
        taken, resets the service once more after what it is at, and before it saves anything new.
        """
        self._give_up(lambda order: True)
        self._link.forget()
        with self._changed:
            self._is_reset_due = self._link.rank == 0
            self._changed.notify_all()

    def reads(self, request_id: str) -> bool:
        """Return whether a request's blocks are still to be read."""
        with self._changed:
            return self._reads(request_id)

    def wait_read(self, request_ids: Collection[str], timeout_s: float) -> None:
        """Wait until the blocks of one of the requests are read."""
        with self._changed:
            self._changed.wait_for(
                lambda: not all(map(self._reads, request_ids)), timeout=timeout_s
            )

    def stop(self) -> None:
        """Give up what is not being copied, and stop; wait for `PATIENCE_S` for what is."""
        self._give_up(lambda order: True)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=PATIENCE_S)

    def _give_up(self, concerns: Callable[[SaveOrder], bool]) -> None:
        with self._changed:
            for saving in (self._current, *self._orders):
                if saving is not None and concerns(saving.order):
                    saving.is_given_up = True
            self._orders = deque(one for one in self._orders if not one.is_given_up)
            self._changed.notify_all()
            current = self._current
            if current is not None and concerns(current.order):
                self._changed.wait_for(lambda: not self._is_copying)

    def _reads(self, request_id: str) -> bool:
        return any(
            saving.order.request_id == request_id and not (saving.is_read or saving.is_given_up)
            for saving in (self._current, *self._orders)
            if saving is not None
        )

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None when stopped."""
        with self._changed:
            self._current = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._orders or self._is_reset_due or self._stopped)
            if self._is_reset_due:
                self._is_reset_due = False
                return self._reset_service
            if self._stopped:
                return None
            saving = self._current = self._orders.popleft()
            self._current_since_s = time.monotonic()
            return lambda: self._carry_out(saving)

    def _reset_service(self) -> None:
        try:
            self._store.reset(self._link.facts.identity)
        except KvferryError as error:
            _log.error("what was saved while the cache was reset may be found: %s", error)

    def _carry_out(self, saving: "_Saving") -> None:
        try:
            num_saved = self._save(saving)
        except Exception:
            # The next order may well succeed; a thread that is gone saves nothing any more.
            _log.exception("a save of %s failed", saving.order.request_id)
            num_saved = 0
        self.num_saved_blocks += num_saved
        self.num_failed_blocks += len(saving.order.hashes) - num_saved

    def _save(self, saving: "_Saving") -> int:
        """Return how many of the order's first blocks were saved."""
        order, size = saving.order, self._link.num_slots
        for begin in range(0, len(order.hashes), size):
            hashes = order.hashes[begin : begin + size]
            if not self._copied(saving, hashes, order.first_block + begin):
                return begin
            with self._changed:
                saving.is_read = begin + size >= len(order.hashes)
                self._changed.notify_all()
            if not self._taken(saving, hashes, order.first_block + begin):
                return begin
        return len(order.hashes)

    def _copied(self, saving: "_Saving", hashes: Sequence[BlockHash], first_block: int) -> bool:
        saving.computed()
        with self._changed:
            if saving.is_given_up:
                return False
            if time.monotonic() > saving.end_s:
                _log.warning("blocks of %s were not saved in time", saving.order.request_id)
                return False
            self._is_copying = True
        try:
            self._link.put(hashes, first_block, saving.order.blocks)
        finally:
            with self._changed:
                self._is_copying = False
                self._changed.notify_all()
        return True

    def _taken(self, saving: "_Saving", hashes: Sequence[BlockHash], first_block: int) -> bool:
        end_s = time.monotonic() + (OTHERS_WAIT_FOR_S if self._link.rank else RETRY_FOR_S)
        why: object = "another rank has not copied them"
        while not saving.is_given_up and time.monotonic() < end_s:
            try:
                if self._is_stored(saving, hashes, first_block):
                    return True
            except NotFoundError as missing:
                why = missing
            except KvferryError as refused:
                why = refused
                break
            time.sleep(RETRY_PAUSE_S)
        if not saving.is_given_up:
            _log.warning("%d blocks were not saved: %s", len(hashes), why)
        return False

    def _is_stored(self, saving: "_Saving", hashes: Sequence[BlockHash], first_block: int) -> bool:
        identity = self._link.facts.identity
        if self._link.rank:
            return self._store.holds(saving.store_address, identity=identity, hashes=hashes)
        num_held = self._store.take(
            saving.store_address,
            identity=identity,
            hashes=hashes,
            first_block=first_block,
            source=saving.engine,
            timeout_s=TAKE_TIMEOUT_S,
        )
        return num_held == len(hashes)


class _Saving:
    """An order on its way; `computed` waits until the engine's device has its blocks."""

    def __init__(
        self, order: SaveOrder, engine: Source, store_address: str, computed: Callable[[], None]
    ) -> None:
        self.order = order
        self.engine = engine
        self.store_address = store_address
        self.computed = computed
        self.end_s = time.monotonic() + SAVE_FOR_S
        self.is_given_up = False
        self.is_read = False
