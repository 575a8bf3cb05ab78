"""The heartbeat of a node's stores; brings those back that the coordinator does not know."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvferry.proto.errors import KvferryError, NotRegisteredError

WATCH_S = 1.0
"""So often each store is heard."""

STOP_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


class WatchedStore(Protocol):
    """A registered store."""

    def beat(self) -> object:
        """Tell the coordinator that the store lives; returns within `pulse.BEAT_TIMEOUT_S`.

        Raises:
            NotRegisteredError: the store has to come back.
            KvferryError: the coordinator does not answer, or refused.
        """

    def come_back(self) -> None:
        """Register again with all that is held.

        Raises:
            KvferryError: it did not succeed and may be tried again.
        """


class StoreWatch:
    """Works from construction to `stop`, in a thread of its own, and one more for each store.

    A store that comes back tells all that it holds, which may take longer than others may be
    silent.

    Args:
        stores: returns those there are.
    """

    def __init__(self, stores: Callable[[], Sequence[WatchedStore]]) -> None:
        self._stores = stores
        self._is_over = False
        # Of each store that is being looked after: whether to look again afterwards.
        self._busy: dict[int, bool] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-stores", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look at once: a store has found out that it is not known. Returns at once, too."""
        self._wake.set()

    def stop(self) -> None:
        """Watch no more; what is under way may go on for a while. Repeating is fine."""
        self._is_over = True
        self._wake.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(WATCH_S)
            self._wake.clear()
            for store in self._stores():
                if not self._is_over and self._begins(store):
                    self._start(store)

    def _begins(self, store: WatchedStore) -> bool:
        """Note that a store is looked after from now on, or once more if it is already."""
        with self._lock:
            is_free = id(store) not in self._busy
            self._busy[id(store)] = not is_free
            return is_free

    def _ended(self, store: WatchedStore) -> None:
        with self._lock:
            looks_again = self._busy.pop(id(store))
        if looks_again:
            self._wake.set()

    def _start(self, store: WatchedStore) -> None:
        look = partial(self._look_after, store)
        try:
            threading.Thread(target=look, name="kvferry-store", daemon=True).start()
        except RuntimeError:  # no thread can be made now; the next look may succeed
            self._ended(store)
            _log.exception("a store cannot be looked after")

    def _look_after(self, store: WatchedStore) -> None:
        try:
            self._beat(store)
        except KvferryError as error:
            _log.warning("a store is not heard now: %s", error)
        except Exception:  # the next look may succeed
            _log.exception("a store cannot be looked after")
        finally:
            self._ended(store)

    def _beat(self, store: WatchedStore) -> None:
        try:
            store.beat()
        except NotRegisteredError:
            if not self._is_over:  # a store that was removed must not come back
                store.come_back()
