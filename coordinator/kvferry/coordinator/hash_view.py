"""A request's hashes at a coarser block, merged only where they are looked at."""

from collections.abc import Iterator, Sequence
from typing import overload

from kvferry.proto.hashing import merged_view
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import KeyFormat


class HashView(Sequence[BlockHash]):
    """One hash per run of `ratio` hash blocks; an incomplete last run is left out.

    What a run's hash is made of is the key format's matter (`merged_view`).
    """

    def __init__(self, hashes: Sequence[BlockHash], ratio: int, key_format: KeyFormat) -> None:
        self._hashes = hashes
        self._ratio = ratio
        self._key_format = key_format

    def __len__(self) -> int:
        return len(self._hashes) // self._ratio

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[BlockHash, ...]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | tuple[BlockHash, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._merge(start, stop)[::step]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._merge(index, index + 1)[0]

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._merge(0, len(self)))

    def _merge(self, start: int, stop: int) -> tuple[BlockHash, ...]:
        run = self._hashes[start * self._ratio : stop * self._ratio]
        return merged_view(run, ratio=self._ratio, key_format=self._key_format)


def view_at(hashes: Sequence[BlockHash], ratio: int, key_format: KeyFormat) -> Sequence[BlockHash]:
    """Return the hashes seen at blocks of `ratio` hash blocks; the very same ones for 1."""
    return hashes if ratio == 1 else HashView(hashes, ratio, key_format)
