"""How the cells of a selection travel: a chunk of tokens at a time, as if each were a block.

So a selection is cut into frames, checked and counted by what moves whole blocks, and both sides
know the chunks from the selection alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvferry.worker.frames import Geometry, Segment
from kvferry.worker.group_memory import GroupMemory
from kvferry.worker.reshard_io import Cells, gather, require_held, scatter
from kvferry.worker.selection import BlockTable

CHUNK_PAGE_BYTES = 128 << 10
"""Bytes of a chunk in one layer, about: much more, and a lost block would cost many others."""


class Chunks:
    """The cells of one rank, cut; a chunk has `geometry.block_tokens` tokens, the last maybe fewer.

    `last_page_bytes` are the bytes of the last chunk in one layer. The canonical bytes of a chunk
    are those of `reshard_io`, layer by layer: [layers, 2 (K, V), tokens, heads, head_size].

    Args:
        memory: where the cells lie.
        table: the rank's blocks of the sequence; may end early where only the first chunks move.
        cells: at least one token, ascending.

    Raises:
        BadInputError: layers or heads that this memory does not hold.
    """

    def __init__(self, memory: GroupMemory, table: BlockTable, cells: Cells) -> None:
        require_held(memory, cells)
        token_bytes = 2 * len(cells.heads) * memory.head_bytes
        chunk_tokens = max(1, CHUNK_PAGE_BYTES // token_bytes)
        num_tokens = len(cells.tokens)
        self.cells = cells
        self.num_chunks = -(-num_tokens // chunk_tokens)
        self.geometry = Geometry(
            num_layers=len(cells.layers),
            page_bytes=chunk_tokens * token_bytes,
            block_tokens=chunk_tokens,
        )
        self.last_page_bytes = token_bytes * (num_tokens - (self.num_chunks - 1) * chunk_tokens)
        self._memory = memory
        self._table = table

    def tokens_of(self, num_chunks: int) -> int:
        """Return the number of tokens in the first so many chunks."""
        return min(num_chunks * self.geometry.block_tokens, len(self.cells.tokens))

    def cells_of(self, index: int) -> Cells:
        """Return the cells of one chunk."""
        tokens = slice(self.tokens_of(index), self.tokens_of(index + 1))
        return replace(self.cells, tokens=self.cells.tokens[tokens])

    def pieces(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Return the canonical bytes of the segments, one after the other.

        Raises:
            BadInputError: tokens beyond the table.
        """
        return [gather(self._memory, self._table, self._part(segment)) for segment in segments]

    def views(self, _: Sequence[Segment]) -> None:
        """Return None: the bytes do not lie in memory as they are sent."""

    def write(self, segments: Sequence[Segment], payload: bytes | memoryview) -> None:
        """Put what the other side's `pieces` returned for the segments where it belongs.

        Raises:
            BadInputError: tokens beyond the table.
        """
        whole = memoryview(payload)
        for segment in segments:
            part = whole[segment.offset : segment.offset + segment.length]
            scatter(self._memory, self._table, self._part(segment), part)

    def _part(self, segment: Segment) -> Cells:
        first = self.cells.layers.start
        layers = range(first + segment.layer_start, first + segment.layer_end)
        return replace(self.cells_of(segment.hash_index), layers=layers)
