"""What leaves a worker: the answer to a fetch, and its frames, which are checked after the copy."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvferry.worker.checksum import (
    SegmentDigest,
    frame_checksum,
    in_windows,
    segment_checksums,
)
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

    def kept_checksums(self, segments: Sequence[Segment]) -> list[bytes]:
        """Return the checksum of each segment, if all are known; else nothing."""

    def keep_checksums(self, segments: Sequence[Segment], checksums: Sequence[bytes]) -> None:
        """Keep the checksums of segments that were still there after they were made."""


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
        self._served = served
        self._checksums: list[bytes] = []
        self._are_kept = False

    @property
    def checksum(self) -> int:
        """That of the segments as they are known, or as they are now."""
        if not self._have_checksums():
            self._checksums = segment_checksums(self.segments, self.pieces)
        return frame_checksum(self._checksums)

    def hashed_windows(self) -> Iterator[list[memoryview]]:
        """Yield the pieces some at a time, each to be copied at once: its checksum is just made."""
        if self._have_checksums():
            yield from in_windows(self.pieces)
            return
        digest = SegmentDigest(self.segments)
        for window in in_windows(self.pieces):
            digest.update(window)
            yield window
        self._checksums = digest.checksums

    def settle(self) -> int:
        """Return how many of the first segments are unchanged since their blocks were found."""
        self.is_settled = True
        kept = len(self.segments)
        for index, segment in enumerate(self.segments):
            self.lost_hash = self._served.lost_hash(segment.hash_index)
            if self.lost_hash is not None:
                kept = index
                break
        if self._checksums and not self._are_kept:
            self._served.keep_checksums(self.segments[:kept], self._checksums[:kept])
        return kept

    def first(self, num_segments: int) -> "OutgoingFrame":
        """Return the frame of the first segments, read anew."""
        return OutgoingFrame(self.segments[:num_segments], self._served)

    def _have_checksums(self) -> bool:
        if not self._checksums:
            self._checksums = self._served.kept_checksums(self.segments)
            self._are_kept = bool(self._checksums)
        return bool(self._checksums)
