"""What a worker has moved and refused since it started, by direction and path."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, get_args

from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.pull import CANCELLED

Direction = Literal["served", "pulled", "stored", "taken"]
"""Seen from here: `served` to a peer that fetches, `pulled` from peers, `stored` by a client.

`taken` is a call to take blocks; its bytes are counted where they are pulled.
"""

CountedPath = Literal["grpc"] | Path
COUNTED_PATHS: tuple[CountedPath, ...] = ("grpc", *ALL_PATHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """Transfers of one direction over one path; a transfer is one call.

    `num_started` counts those in progress too; `seconds` is how long the others took, added up.
    `failures` counts those that ended before everything had moved, by reason: an error's class
    name, or `CANCELLED`. Bytes are block bytes, without envelopes.
    """

    num_started: int = 0
    num_in_progress: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Totals at one moment; `num_checksum_failures` counts received frames."""

    transfers: dict[tuple[Direction, CountedPath], TransferCounts] = field(default_factory=dict)
    num_blocks_pulled: int = 0
    num_checksum_failures: int = 0

    def of(self, direction: Direction) -> TransferCounts:
        """Return the sums of a direction over all paths."""
        parts = [counts for (one, _), counts in self.transfers.items() if one == direction]
        failures: Counter[str] = Counter()
        for part in parts:
            failures.update(part.failures)
        return TransferCounts(
            num_started=sum(part.num_started for part in parts),
            num_in_progress=sum(part.num_in_progress for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
            seconds=sum(part.seconds for part in parts),
            failures=dict(failures),
        )


class StatsCounter:
    """Counts into one `WorkerStats`; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All from the start, so that a reader can tell "never" from "not counted".
        self._transfers: dict[tuple[Direction, CountedPath], TransferCounts] = {
            (direction, path): TransferCounts()
            for direction in get_args(Direction)
            for path in COUNTED_PATHS
        }
        self._num_blocks_pulled = 0
        self._num_checksum_failures = 0

    def transfer(self, direction: Direction) -> "CountedTransfer":
        """Return what counts one transfer, from the beginning to the end of a `with`."""
        return CountedTransfer(self, direction)

    def add(self, *, num_blocks_pulled: int = 0, num_checksum_failures: int = 0) -> None:
        """Count blocks that were pulled whole, and frames whose checksum was wrong."""
        with self._lock:
            self._num_blocks_pulled += num_blocks_pulled
            self._num_checksum_failures += num_checksum_failures

    def add_to(
        self,
        of: tuple[Direction, CountedPath],
        *,
        num_started: int = 0,
        num_in_progress: int = 0,
        num_bytes: int = 0,
        seconds: float = 0.0,
        reason: str | None = None,
    ) -> None:
        """Add to the counts of one direction and path; `reason` is that of one more failure."""
        with self._lock:
            counts = self._transfers[of]
            failures = counts.failures
            if reason is not None:
                failures = failures | {reason: failures.get(reason, 0) + 1}
            self._transfers[of] = TransferCounts(
                num_started=counts.num_started + num_started,
                num_in_progress=counts.num_in_progress + num_in_progress,
                num_bytes=counts.num_bytes + num_bytes,
                seconds=counts.seconds + seconds,
                failures=failures,
            )

    def read(self) -> WorkerStats:
        """Return the totals so far."""
        with self._lock:
            return WorkerStats(
                transfers=dict(self._transfers),
                num_blocks_pulled=self._num_blocks_pulled,
                num_checksum_failures=self._num_checksum_failures,
            )


class CountedTransfer:
    """One transfer under way, told by whoever moves its bytes, in one thread.

    It begins as a gRPC call. An exception that passes is its failure, unless `failed` said why.
    While `is_whole` is False, its end is a failure even without one: the other side has left.
    """

    def __init__(self, counter: StatsCounter, direction: Direction) -> None:
        self.is_whole = True
        self._counter = counter
        self._of: tuple[Direction, CountedPath] = (direction, "grpc")
        self._reason: str | None = None
        self._started_s = 0.0

    def __enter__(self) -> "CountedTransfer":
        self._started_s = time.monotonic()
        self._counter.add_to(self._of, num_started=1, num_in_progress=1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = self._reason
        if reason is None and isinstance(error, Exception):
            reason = type(error).__name__
        elif reason is None and not self.is_whole:
            reason = CANCELLED
        seconds = time.monotonic() - self._started_s
        self._counter.add_to(self._of, num_in_progress=-1, seconds=seconds, reason=reason)

    def over(self, path: Path) -> None:
        """Say that the bytes go another way than in the call."""
        self._counter.add_to(self._of, num_started=-1, num_in_progress=-1)
        self._of = (self._of[0], path)
        self._counter.add_to(self._of, num_started=1, num_in_progress=1)

    def moved(self, num_bytes: int) -> None:
        """Count block bytes that were sent, or are in place."""
        self._counter.add_to(self._of, num_bytes=num_bytes)

    def failed(self, reason: str) -> None:
        """Say why the transfer ends early."""
        self._reason = reason
