"""The part of a sequence that two ranks share to bytes and back, whatever the layouts of the two.

That includes their memory orders: memory counts as rows, as long as its order lets them be, and
strides say which rows hold what is wanted.

The bytes of some cells are [layers, 2 (K, V), tokens, heads, head_size], contiguous, little-endian:
tokens in the order of the sequence, layers and heads ascending.
"""

import math
from dataclasses import dataclass

import numpy as np

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import NULL_BLOCK
from kvferry.proto.reshard import Transfer
from kvferry.proto.token_runs import Positions
from kvferry.worker.device import DeviceBytes
from kvferry.worker.group_memory import GroupMemory
from kvferry.worker.selection import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """What is moved, as one of the two ranks counts it.

    `layers` are counted within the group and `heads` over the whole model. `tokens` are the rank's
    local tokens, ascending, from the first one of its block table; int64 [num_tokens].
    """

    layers: range
    heads: range
    tokens: Positions


def source_cells(transfer: Transfer, *, skipped_tokens: int = 0) -> Cells:
    """Return what the source rank reads.

    `skipped_tokens` are its local tokens before its block table begins.
    """
    tokens = np.concatenate([runs.source_tokens() for runs in transfer.runs])
    return _cells(transfer, tokens, skipped_tokens)


def destination_cells(transfer: Transfer, *, skipped_tokens: int = 0) -> Cells:
    """Return what the destination rank writes: the same tokens in the same order.

    `skipped_tokens` are its local tokens before its block table begins.
    """
    tokens = np.concatenate([runs.destination_tokens() for runs in transfer.runs])
    return _cells(transfer, tokens, skipped_tokens)


def gather(memory: GroupMemory, table: BlockTable, cells: Cells) -> memoryview:
    """Return the bytes of the cells; `table` has the rank's blocks of the sequence.

    Raises:
        BadInputError: cells that do not lie in this memory or table.
    """
    pieces, rows, row_bytes = _places(memory, table, cells)
    # Not zeroed and not copied into bytes: either costs as much as the gathering itself.
    out = np.empty((len(pieces), len(rows), row_bytes), dtype=np.uint8)
    memory.device.read_rows(pieces, rows, out)
    return out.reshape(-1).data


def scatter(
    memory: GroupMemory, table: BlockTable, cells: Cells, payload: bytes | memoryview
) -> None:
    """Overwrite the cells with what `gather` returned for the cells of the other rank.

    The bytes are in place when the call returns.

    Raises:
        BadInputError: cells that do not lie in this memory or table, or a payload of another
            length.
    """
    pieces, rows, row_bytes = _places(memory, table, cells)
    if len(payload) != len(pieces) * len(rows) * row_bytes:
        raise BadInputError(
            "the payload does not fill its cells",
            given=len(payload),
            allowed=f"{len(pieces) * len(rows) * row_bytes} bytes",
        )
    source = np.frombuffer(payload, dtype=np.uint8).reshape(len(pieces), len(rows), row_bytes)
    memory.device.write_rows(pieces, rows, source)


def _cells(transfer: Transfer, tokens: Positions, skipped_tokens: int) -> Cells:
    # Runs of several loops interleave. Either rank's local tokens go up with the position, so
    # sorting them puts both sides' into the order of the sequence.
    tokens.sort()
    return Cells(
        layers=transfer.layers, heads=transfer.heads, tokens=np.subtract(tokens, skipped_tokens)
    )


def require_cells(memory: GroupMemory, table: BlockTable, cells: Cells) -> None:
    """Refuse cells that do not lie in this memory or table.

    Raises:
        BadInputError: saying what does.
    """
    require_held(memory, cells)
    _slots(memory, table, cells)


def require_held(memory: GroupMemory, cells: Cells) -> None:
    """Refuse layers or heads that do not lie in this memory.

    Raises:
        BadInputError: naming those that do.
    """
    for name, given, held in (
        ("layers", cells.layers, memory.layers),
        ("heads", cells.heads, memory.heads),
    ):
        if not held.start <= given.start < given.stop <= held.stop:
            raise BadInputError(f"no such {name} here", given=str(given), allowed=str(held))


def _places(
    memory: GroupMemory, table: BlockTable, cells: Cells
) -> tuple[list[DeviceBytes], Positions, int]:
    """Return K and V of each layer, the rows of each that are meant, and the bytes of a row."""
    block_tokens, strides = memory.geometry.block_tokens, memory.strides
    require_held(memory, cells)
    slots = _slots(memory, table, cells)
    first_head = cells.heads.start - memory.heads.start
    row_heads, row_tokens = 1, 1
    # The larger a row, the fewer copies. Where heads lie side by side it is as many of them as both
    # the memory and what is wanted of it consist of. Where those are all that is wanted and the
    # next token's follow at once, it is as many tokens as lie side by side everywhere.
    if strides.head_step == memory.head_bytes:
        row_heads = math.gcd(len(memory.heads), len(cells.heads), first_head)
    row_bytes = row_heads * memory.head_bytes
    if row_heads == len(cells.heads) and strides.token_step == row_bytes:
        row_tokens = _tokens_side_by_side(slots, block_tokens)
        row_bytes *= row_tokens
    # Memory has no gaps, so each of these distances is a whole number of rows.
    block, token = np.divmod(slots[::row_tokens], block_tokens)
    heads = np.arange(first_head, first_head + len(cells.heads), row_heads) * strides.head_step
    firsts = block * strides.block_step + token * strides.token_step
    rows = np.add.outer(firsts, heads).ravel() // row_bytes
    pieces = [side for layer in cells.layers for side in memory.sides[layer - memory.layers.start]]
    return pieces, rows, row_bytes


def _slots(memory: GroupMemory, table: BlockTable, cells: Cells) -> Positions:
    """Return where in each piece the tokens lie, and refuse tokens that have no block."""
    block_tokens = memory.geometry.block_tokens
    tokens, num_tokens = cells.tokens, len(table) * block_tokens
    if not len(tokens) or not 0 <= tokens[0] <= tokens[-1] < num_tokens:
        raise BadInputError(
            "no such tokens in the block table",
            given=f"{tokens[0]} to {tokens[-1]}" if len(tokens) else "none",
            allowed=f"0 to {num_tokens - 1}",
        )
    block, token = np.divmod(tokens, block_tokens)
    block_ids = table[block]
    if not NULL_BLOCK < block_ids.min() <= block_ids.max() < memory.num_blocks:
        raise BadInputError(
            "no such blocks here",
            given=f"{block_ids.min()} to {block_ids.max()}",
            allowed=f"1 to {memory.num_blocks - 1}",
        )
    slots: Positions = block_ids * block_tokens + token
    return slots


def _tokens_side_by_side(slots: Positions, block_tokens: int) -> int:
    """Return the largest part of a block such that the slots are whole parts of blocks."""
    begins = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
    return int(np.gcd.reduce(np.concatenate([begins, slots[begins], [len(slots), block_tokens]])))
