"""Where a front is that may come back elsewhere."""

import logging
import threading
import time
from collections.abc import Callable

from kvferry.proto.errors import KvferryError

LOOK_PAUSE_S = 1.0
"""Callers that find nobody together ask at most so often where the front is now."""

FindAddress = Callable[[], str]
"""Returns `host:port` of a front as it is now; raises kvferry's errors."""

_log = logging.getLogger(__name__)


class MovingAddress:
    """The last known address of a front. Thread-safe.

    Args:
        address: `host:port`.
        find: tells where it is now; None: it always comes back at the same address.
    """

    def __init__(self, address: str, find: FindAddress | None = None) -> None:
        self._address = address
        self._find = find
        self._looking = threading.Lock()
        self._looked_s = -LOOK_PAUSE_S

    def __str__(self) -> str:
        return self._address

    def look_again(self) -> None:
        """Find out where it is now, if somebody can tell; after a call that nobody answered."""
        if self._find is None or not self._looking.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._looked_s >= LOOK_PAUSE_S:
                self._address = self._find()
                self._looked_s = time.monotonic()
        except KvferryError as error:
            _log.warning("nobody tells where %s is now: %s", self._address, error)
        finally:
            self._looking.release()
