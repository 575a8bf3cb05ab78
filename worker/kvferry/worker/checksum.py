"""The checksum of a frame's payload, wherever its pieces lie."""

from collections.abc import Iterable

import xxhash


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the xxh3-64 of the pieces, one after the other."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()
