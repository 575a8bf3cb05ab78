"""The checksum of a frame's payload, wherever its pieces lie."""

from collections.abc import Iterable, Iterator

import xxhash

WINDOW_BYTES = 256 << 10
"""So many bytes stay in a processor's cache between its checksum and its copy."""


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the xxh3-64 of the pieces, one after the other."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


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
