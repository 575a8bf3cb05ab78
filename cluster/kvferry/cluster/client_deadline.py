"""A moment by which a call of the public client ends."""

import time

from kvferry.cluster.control_client import require_timeout
from kvferry.proto.errors import DeadlineError


class Deadline:
    """A moment after which nothing is waited for.

    Args:
        timeout_s: seconds until then.

    Raises:
        ConfigError: as `require_timeout`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = require_timeout(timeout_s)
        self._end_s = time.monotonic() + self._timeout_s

    def left_s(self) -> float:
        """Return the seconds left; 0 ends every call at once with DeadlineError."""
        return max(0.0, self._end_s - time.monotonic())

    def require_s(self) -> float:
        """Return the seconds left, for what cannot be asked for 0 seconds.

        Raises:
            DeadlineError: none are left.
        """
        left_s = self.left_s()
        if not left_s:
            raise DeadlineError("the call's time is over", allowed=f"{self._timeout_s} s")
        return left_s
