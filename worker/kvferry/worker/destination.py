"""Where what arrives is put, as the receiving side of a transfer sees it."""

from collections.abc import Sequence
from typing import Protocol

from kvferry.worker.frames import Segment


class Destination(Protocol):
    """What takes the segments of a transfer: whole blocks, or the chunks of a selection."""

    def views(self, segments: Sequence[Segment]) -> list[memoryview] | None:
        """Return the places of the segments themselves, if the bytes lie there as they travel."""

    def write(self, segments: Sequence[Segment], payload: bytes | memoryview) -> None:
        """Put the bytes of the segments where they belong; they are there when it returns."""
