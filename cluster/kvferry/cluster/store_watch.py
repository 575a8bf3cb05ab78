"""Brings the stores of a node back to a coordinator that does not know them any more."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Command, Locate, Located, Reply

WATCH_S = 1.0
"""How often the coordinator is asked which life it is in."""

STOP_TIMEOUT_S = 1.0
_NOBODY = bytes(32)

_log = logging.getLogger(__name__)


_R = TypeVar("_R", bound=Reply)


class Asker(Protocol):
    """What the watch needs of a `ControlClient`."""

    def ask(self, command: Command, expected: type[_R]) -> _R:
        """Return the coordinator's reply."""

    def close(self) -> None:
        """Ask no more."""


class WatchedStore(Protocol):
    """A registered store."""

    def is_known(self, epoch: Epoch) -> bool:
        """Tell whether the coordinator of that epoch knows the store."""

    def come_back(self) -> None:
        """Register again with all that is held.

        Raises:
            KvferryError: it did not succeed and may be tried again.
        """


class StoreWatch:
    """Watches from construction to `stop`, in a thread of its own.

    A store that takes something learns from the coordinator that it is not known; one that only
    serves would not, so the watch asks.

    Args:
        client: asks the coordinator; closed at the end.
        stores: returns those there are.
    """

    def __init__(self, client: Asker, stores: Callable[[], Sequence[WatchedStore]]) -> None:
        self._client = client
        self._stores = stores
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-stores", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look at once: a store has found out that it is not known. Returns at once, too."""
        self._wake.set()

    def stop(self) -> None:
        """Watch no more; what is under way may go on for a call's time. Repeating is fine."""
        self._is_over = True
        self._wake.set()
        self._thread.join(STOP_TIMEOUT_S)
        self._client.close()

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(WATCH_S)
            self._wake.clear()
            try:
                self._look()
            except Exception as error:  # nobody else would bring the stores back
                _log.warning("the node's stores cannot be looked after now: %s", error)

    def _look(self) -> None:
        stores = self._stores()
        if self._is_over or not stores:
            return
        # Of no hashes and an identity that nobody has: it tells the epoch at next to no cost.
        asked = Locate(identity_digest=_NOBODY, hashes=())
        epoch = self._client.ask(asked, Located).epoch
        for store in stores:
            if not store.is_known(epoch):
                try:
                    store.come_back()
                except KvferryError as error:
                    _log.warning("a store could not come back yet: %s", error)
