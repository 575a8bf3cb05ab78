"""What a fetch is answered with: blocks of the KV memory, or the selected part of them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvferry.worker.block_io import pieces_of
from kvferry.worker.checksum import KeptChecksums
from kvferry.worker.chunks import Chunks
from kvferry.worker.frames import Segment, places_of
from kvferry.worker.group_memory import GroupMemory
from kvferry.worker.outgoing import Served
from kvferry.worker.reshard_io import Cells
from kvferry.worker.residency import Resident
from kvferry.worker.selection import Selection


class Holds(Protocol):
    """Whoever knows what blocks hold: the worker, or a peer that maps its memory."""

    def still_holds(self, resident: Resident) -> bool:
        """Return whether the block has held the same content ever since it was found."""


def served_of(
    memory: GroupMemory,
    holds: Holds,
    residents: Sequence[Resident],
    selection: Selection | None,
    *,
    num_asked: int,
    checksums: KeptChecksums,
) -> Served:
    """Return what a fetch of a group's blocks, or of a selection of them, is answered with.

    Args:
        memory: the group's.
        holds: tells whether the blocks are still what they were found as.
        residents: the first of the asked blocks.
        selection: the part of them that is wanted, None for all of each.
        num_asked: number of asked blocks.
        checksums: of whole blocks, those that are known and those that become so.

    Raises:
        BadInputError: a selection that does not fit the blocks or the memory.
    """
    if selection is None:
        return _ServedBlocks(memory, holds, residents, checksums)
    return _ServedSelection(memory, holds, residents, selection, num_asked=num_asked)


class _ServedBlocks:
    """Whole blocks of a group."""

    def __init__(
        self,
        memory: GroupMemory,
        holds: Holds,
        residents: Sequence[Resident],
        checksums: KeptChecksums,
    ) -> None:
        self.geometry = memory.geometry
        self.num_found = len(residents)
        self.last_page_bytes: int | None = None
        self._memory = memory
        self._holds = holds
        self._residents = residents
        self._block_ids = [resident.block_id for resident in residents]
        self._checksums = checksums

    def pieces(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Return the canonical bytes of the segments, one after the other."""
        return pieces_of(self._memory, places_of(segments, self._block_ids))

    def lost_hash(self, index: int) -> int | None:
        """Return the index if the block no longer holds its hash."""
        return None if self._holds.still_holds(self._residents[index]) else index

    def kept_checksums(self, segments: Sequence[Segment]) -> list[bytes]:
        """Return the checksum of each segment, if all are known; else nothing."""
        found = []
        for segment in segments:
            checksum = self._checksums.find(self._residents[segment.hash_index], segment)
            if checksum is None:
                return []
            found.append(checksum)
        return found

    def keep_checksums(self, segments: Sequence[Segment], checksums: Sequence[bytes]) -> None:
        """Keep the checksums of segments that were still there after they were made."""
        for segment, checksum in zip(segments, checksums, strict=True):
            self._checksums.keep(self._residents[segment.hash_index], segment, checksum)


class _ServedSelection:
    """The chunks of a selection, as far as all blocks are here that a chunk has tokens of.

    Args:
        num_asked: number of blocks that the selection counts its tokens over.

    Raises:
        BadInputError: a selection that does not fit the blocks or the memory.
    """

    def __init__(
        self,
        memory: GroupMemory,
        holds: Holds,
        residents: Sequence[Resident],
        selection: Selection,
        *,
        num_asked: int,
    ) -> None:
        block_tokens = memory.geometry.block_tokens
        tokens = selection.tokens(num_asked * block_tokens)
        self._chunks = Chunks(
            memory,
            np.array([resident.block_id for resident in residents], dtype=np.int64),
            Cells(layers=selection.layers, heads=selection.heads, tokens=tokens),
        )
        self.geometry = self._chunks.geometry
        num_held = int(np.searchsorted(tokens, len(residents) * block_tokens))
        is_whole = num_held == len(tokens)
        self.num_found = (
            self._chunks.num_chunks if is_whole else num_held // self.geometry.block_tokens
        )
        self.last_page_bytes = self._chunks.last_page_bytes if is_whole else None
        self._block_tokens = block_tokens
        self._holds = holds
        self._residents = residents

    def pieces(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Return the bytes of the segments, one after the other."""
        return self._chunks.pieces(segments)

    def lost_hash(self, index: int) -> int | None:
        """Return the first block that a chunk has tokens of and that no longer holds its hash."""
        for block in np.unique(self._chunks.cells_of(index).tokens // self._block_tokens).tolist():
            if not self._holds.still_holds(self._residents[block]):
                return int(block)
        return None

    def kept_checksums(self, _: Sequence[Segment]) -> list[bytes]:
        """Return nothing: which chunks a selection has is up to each caller."""
        return []

    def keep_checksums(self, _: Sequence[Segment], __: Sequence[bytes]) -> None:
        """Do nothing, as `kept_checksums`."""
