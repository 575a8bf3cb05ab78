"""What leaves a worker: the answer to a fetch, and its frames, which are checked after the copy."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import xxhash

from kvferry.worker.checksum import checksum_of, in_windows
from kvferry.worker.frames import Geometry, Segment


class Served(Protocol):
    """What a fetch is answered with: `num_found` blocks, or chunks of a selection of blocks."""

    @property
    def geometry(self) -> Geometry:
        """How they are cut."""

    @property
    def num_found(self) -> int:
        """How many of those asked for are here."""

    @property
    def last_page_bytes(self) -> int | None:
        """The page of the last one that is here, where it is smaller than that of the others."""

    def pieces(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Return the bytes of the segments, one after the other; maybe the memory itself."""

    def lost_hash(self, index: int) -> int | None:
        """Return which hash is no longer where it was found, of those that this one needs."""


class OutgoingFrame:
    """Some bytes of some blocks, as they lie in memory.

    Whoever sends them copies `pieces` and then calls `settle`: only as many segments as it returns
    were still what they should be. `first` is the frame of those.
    """

    def __init__(self, segments: tuple[Segment, ...], served: Served) -> None:
        self.segments = segments
        self.pieces = served.pieces(segments)
        self.lost_hash: int | None = None
        self.is_settled = False
        self._checksum: int | None = None
        self._served = served

    @property
    def checksum(self) -> int:
        """The xxh3-64 of the pieces: as `hashed_windows` found them, or else as they are now."""
        return checksum_of(self.pieces) if self._checksum is None else self._checksum

    def hashed_windows(self) -> Iterator[list[memoryview]]:
        """Yield the pieces some at a time, each to be copied at once: its checksum is just made."""
        digest = xxhash.xxh3_64()
        for window in in_windows(self.pieces):
            for piece in window:
                digest.update(piece)
            yield window
        self._checksum = digest.intdigest()

    def settle(self) -> int:
        """Return how many of the first segments are unchanged since their blocks were found."""
        self.is_settled = True
        for kept, segment in enumerate(self.segments):
            self.lost_hash = self._served.lost_hash(segment.hash_index)
            if self.lost_hash is not None:
                return kept
        return len(self.segments)

    def first(self, num_segments: int) -> "OutgoingFrame":
        """Return the frame of the first segments, read anew."""
        return OutgoingFrame(self.segments[:num_segments], self._served)
