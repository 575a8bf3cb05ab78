"""Which paths lead to which peer, as far as they have been tried."""

import logging
import threading
import time
from collections.abc import Sequence

from kvferry.worker.paths import Path

_log = logging.getLogger(__name__)

# Walls come down and hosts move: a path that failed is tried again after so long.
RETRY_AFTER_S = 60.0


class PathUnusableError(Exception):
    """A path that a peer offered cannot be taken; nothing has been received by it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path: Path = path


class UnusablePaths:
    """Thread-safe. `allowed` are the paths that may be taken at all, besides gRPC."""

    def __init__(self, allowed: Sequence[Path]) -> None:
        self._allowed = tuple(allowed)
        self._lock = threading.Lock()
        self._until_s: dict[tuple[str, Path], float] = {}

    def usable(self, address: str) -> tuple[Path, ...]:
        """Return the paths to offer to take to a peer."""
        now_s = time.monotonic()
        with self._lock:
            return tuple(
                path for path in self._allowed if self._until_s.get((address, path), 0.0) <= now_s
            )

    def avoid(self, address: str, unusable: PathUnusableError) -> None:
        """Take a path no more for `RETRY_AFTER_S`, and say so."""
        _log.warning(
            "%s cannot be reached by %s for %g s: %s",
            address,
            unusable.path,
            RETRY_AFTER_S,
            unusable,
        )
        with self._lock:
            self._until_s[address, unusable.path] = time.monotonic() + RETRY_AFTER_S
