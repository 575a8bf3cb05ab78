"""What a worker has moved and refused since it started."""

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Totals at one moment. Bytes are block bytes, without envelopes.

    `errors` counts by class name the calls that ended in an error, whichever side this worker was.
    """

    num_fetches: int = 0
    num_bytes_served: int = 0
    num_pulls: int = 0
    num_blocks_pulled: int = 0
    num_bytes_pulled: int = 0
    num_stores: int = 0
    num_bytes_stored: int = 0
    num_checksum_failures: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class StatsCounter:
    """Counts into one `WorkerStats`; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Add to the totals named as in `WorkerStats`."""
        with self._lock:
            self._totals.update(amounts)

    def add_error(self, reason: str) -> None:
        """Count one call that ended in an error."""
        with self._lock:
            self._errors[reason] += 1

    def read(self) -> WorkerStats:
        """Return the totals so far."""
        with self._lock:
            return WorkerStats(**self._totals, errors=dict(self._errors))
