"""The checksum of a frame: of its segments' bytes one by one, and then of those checksums.

In two steps, so that a sender can keep those of segments and need not read a block at every send.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from kvferry.proto.ids import BlockId
from kvferry.worker.frames import Segment
from kvferry.worker.residency import Resident

WINDOW_BYTES = 256 << 10
"""So many bytes stay in a processor's cache between their checksum and their copy."""


class SegmentDigest:
    """Takes the bytes of segments, one after the other, in pieces that are cut anywhere.

    `checksums` has those of the segments that are whole: xxh3-64, canonical (big-endian).
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.checksums: list[bytes] = []
        self._lengths = iter([segment.length for segment in segments])
        self._left = next(self._lengths, sys.maxsize)
        self._digest = xxhash.xxh3_64()

    def update(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Take the next pieces."""
        left, digest = self._left, self._digest
        for piece in pieces:
            rest = piece
            while len(rest) >= left:
                digest.update(rest[:left])
                self.checksums.append(digest.digest())
                digest.reset()
                rest, left = rest[left:], next(self._lengths, sys.maxsize)
            digest.update(rest)
            left -= len(rest)
        self._left = left


def segment_checksums(
    segments: Sequence[Segment], pieces: Iterable[bytes | memoryview]
) -> list[bytes]:
    """Return the checksum of each segment, where the pieces together are their bytes."""
    digest = SegmentDigest(segments)
    digest.update(pieces)
    return digest.checksums


def frame_checksum(checksums: Iterable[bytes]) -> int:
    """Return the checksum of a frame, from those of its segments."""
    return xxhash.xxh3_64_intdigest(b"".join(checksums))


class KeptChecksums:
    """The checksums of what blocks hold. Thread-safe.

    One for each block and first layer, so that no choice of frames makes this grow without end.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[BlockId, int], tuple[int, int, bytes]] = {}

    def find(self, resident: Resident, segment: Segment) -> bytes | None:
        """Return the checksum of a segment of what a block holds, if it is known."""
        found = self._of.get((resident.block_id, segment.layer_start))
        if found is None or found[:2] != (resident.generation, segment.layer_end):
            return None
        return found[2]

    def keep(self, resident: Resident, segment: Segment, checksum: bytes) -> None:
        """Keep the checksum of a segment that the block still held after it was made."""
        value = (resident.generation, segment.layer_end, checksum)
        self._of[resident.block_id, segment.layer_start] = value


def in_windows(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield consecutive pieces, about `WINDOW_BYTES` at a time, larger pieces cut."""
    window: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        for part in (piece,) if len(piece) <= WINDOW_BYTES else _parts(piece):
            num_bytes += len(part)
            if num_bytes > WINDOW_BYTES:
                yield window
                window, num_bytes = [], len(part)
            window.append(part)
    yield window


def _parts(piece: memoryview) -> list[memoryview]:
    return [piece[at : at + WINDOW_BYTES] for at in range(0, len(piece), WINDOW_BYTES)]
