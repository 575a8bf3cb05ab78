"""One transfer seen from its receiver: what is expected, what is in place, and how it ended.

Nothing a sender says is trusted: a frame is admitted only if every byte of it has exactly one place
among those still missing, and it counts only once the receiver has put it there.
"""

from collections.abc import Iterable, Sequence

from kvferry.proto.errors import TransferError
from kvferry.worker.checksum import frame_checksum, segment_checksums
from kvferry.worker.frames import Frame, Geometry, Header, Segment


class PullSession:
    """Expects blocks [0, num_asked), each with all layers of `geometry`, each page once.

    `last_page_bytes` is the page of the last block where it is smaller than that of the others.
    """

    def __init__(
        self, num_asked: int, geometry: Geometry, *, last_page_bytes: int | None = None
    ) -> None:
        self.num_asked = num_asked
        self.num_bytes = 0
        self.num_checksum_failures = 0
        self._geometry = geometry
        self._last_page_bytes = geometry.page_bytes if last_page_bytes is None else last_page_bytes
        self._num_found: int | None = None
        self._all_layers = (1 << geometry.num_layers) - 1
        # Per block, bit i is set once layer i is in place.
        self._layers_in_place: list[int] = []
        self._num_complete = 0

    @property
    def num_complete(self) -> int:
        """Length of the prefix of blocks that are in place with all their layers."""
        return self._num_complete

    @property
    def num_found(self) -> int:
        """Length of the prefix that the source said it holds; 0 before its header."""
        return self._num_found or 0

    @property
    def is_finished(self) -> bool:
        """True once everything the source holds of what was asked is in place."""
        return self._num_found is not None and self._num_complete == self._num_found

    def open(self, header: Header) -> None:
        """Take the source's header.

        Raises:
            TransferError: a second header, other sizes than ours, or more blocks than asked for.
        """
        if self._num_found is not None:
            raise TransferError("a second header")
        if header.geometry != self._geometry:
            raise TransferError(
                "the two sides cut blocks differently",
                given=str(header.geometry),
                allowed=str(self._geometry),
            )
        if not 0 <= header.num_found <= self.num_asked:
            raise TransferError(
                "the source announces blocks nobody asked for",
                given=header.num_found,
                allowed=f"0 to {self.num_asked}",
            )
        self._num_found = header.num_found
        self._layers_in_place = [0] * header.num_found

    def admit(self, frame: Frame) -> None:
        """Check a frame before any byte of it is put in place.

        Raises:
            TransferError: as `admit_segments` and `verify`.
        """
        self.admit_segments(frame.segments, len(frame.payload))
        self.verify(segment_checksums(frame.segments, [frame.payload]), frame.checksum)

    def verify(self, found: Iterable[bytes], checksum: int) -> None:
        """Check the checksums of a frame's segments as they came against the one that came too.

        Raises:
            TransferError: that is of others.
        """
        if frame_checksum(found) != checksum:
            self.num_checksum_failures += 1
            raise TransferError("a frame's checksum is wrong")

    def admit_segments(self, segments: Sequence[Segment], payload_bytes: int) -> None:
        """Check where the bytes of a frame belong, before any of them is put there.

        Raises:
            TransferError: no header yet, a segment for an unknown block or layer, of a wrong
                length, over bytes of another, or for a page that is in place already.
        """
        if self._num_found is None:
            raise TransferError("a frame before the header")
        offset = 0
        taken: dict[int, int] = {}
        for segment in segments:
            self._admit_place(segment, taken)
            if segment.offset != offset:
                raise TransferError(
                    "segments overlap or leave a hole", given=segment.offset, allowed=offset
                )
            offset += segment.length
        if offset != payload_bytes:
            raise TransferError(
                "segments do not cover the payload", given=offset, allowed=payload_bytes
            )

    def placed(self, segments: Iterable[Segment]) -> None:
        """Record that the bytes of admitted segments are where they belong."""
        for segment in segments:
            self._layers_in_place[segment.hash_index] |= _layer_bits(segment)
            self.num_bytes += segment.length
        while (
            self._num_complete < len(self._layers_in_place)
            and self._layers_in_place[self._num_complete] == self._all_layers
        ):
            self._num_complete += 1

    def close(self) -> None:
        """Take the end of the messages: the source says that was all.

        Raises:
            TransferError: blocks it announced are missing.
        """
        if not self.is_finished:
            raise TransferError(
                "the transfer ended early",
                given=f"{self._num_complete} whole blocks",
                allowed=f"{self.num_found} blocks" if self._num_found is not None else "a header",
            )

    def _admit_place(self, segment: Segment, taken: dict[int, int]) -> None:
        if not 0 <= segment.hash_index < self.num_found:
            raise TransferError(
                "a segment of a block that was not announced",
                given=segment.hash_index,
                allowed=f"0 to {self.num_found - 1}",
            )
        if not 0 <= segment.layer_start < segment.layer_end <= self._geometry.num_layers:
            raise TransferError(
                "a segment of layers that do not exist",
                given=f"[{segment.layer_start}, {segment.layer_end})",
                allowed=f"within [0, {self._geometry.num_layers})",
            )
        is_last = segment.hash_index == self.num_asked - 1
        page_bytes = self._last_page_bytes if is_last else self._geometry.page_bytes
        length = (segment.layer_end - segment.layer_start) * page_bytes
        if segment.length != length:
            raise TransferError("a segment of a wrong length", given=segment.length, allowed=length)
        bits = _layer_bits(segment)
        already = self._layers_in_place[segment.hash_index] | taken.get(segment.hash_index, 0)
        if already & bits:
            raise TransferError("a page came twice", given=f"block {segment.hash_index}")
        taken[segment.hash_index] = taken.get(segment.hash_index, 0) | bits


def _layer_bits(segment: Segment) -> int:
    return (1 << segment.layer_end) - (1 << segment.layer_start)
