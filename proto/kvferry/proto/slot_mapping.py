"""Where each token of a sequence lives in a rank's KV memory, and how many live there.

With N token shards and interleave I, a block id covers V = block_tokens * N positions, dealt to
the shards I at a time. One shard (the default) is the ordinary slot mapping.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import BadInputError

NOT_HERE = -1
"""Slot of a token that another rank holds."""


def slots(
    block_table: Sequence[int] | npt.NDArray[np.int64],
    start_position: int,
    end_position: int,
    block_tokens: int,
    *,
    rank: int = 0,
    num_shards: int = 1,
    interleave: int = 1,
) -> npt.NDArray[np.int64]:
    """Return the slots of positions [start_position, end_position), `NOT_HERE` for other ranks'.

    Slot s is token `s % block_tokens` of block `s // block_tokens`. Shape
    [end_position - start_position], int64.

    Raises:
        BadInputError: the positions do not lie within the block table, the rank is no shard, or
            `interleave` does not divide `block_tokens`.
    """
    covered = len(block_table) * block_tokens * num_shards
    if not 0 <= start_position <= end_position <= covered:
        raise BadInputError(
            "positions outside the block table",
            given=f"[{start_position}, {end_position})",
            allowed=f"within [0, {covered})",
        )
    if not 0 <= rank < num_shards:
        raise BadInputError("no such shard", given=rank, allowed=f"0 to {num_shards - 1}")
    if interleave < 1 or block_tokens % interleave:
        raise BadInputError(
            "interleave must divide block_tokens", given=interleave, allowed=block_tokens
        )
    position = np.arange(start_position, end_position, dtype=np.int64)
    table_index, in_virtual_block = np.divmod(position, block_tokens * num_shards)
    owner = in_virtual_block // interleave % num_shards
    round_index = in_virtual_block // (num_shards * interleave)
    local = round_index * interleave + in_virtual_block % interleave
    block_id = np.asarray(block_table, dtype=np.int64)[table_index]
    return np.where(owner == rank, block_id * block_tokens + local, NOT_HERE)


def local_lengths(
    lengths: Sequence[int], *, num_shards: int = 1, interleave: int = 1
) -> npt.NDArray[np.int64]:
    """Return how many of the first `length` tokens each rank holds, for every given length.

    Shape [len(lengths), num_shards], int64; the rows add up to `lengths`.

    Raises:
        BadInputError: a length is negative, or `num_shards` or `interleave` is below 1.
    """
    for name, value in (("num_shards", num_shards), ("interleave", interleave)):
        if value < 1:
            raise BadInputError(f"{name} must be positive", given=value, allowed=">= 1")
    total = np.asarray(lengths, dtype=np.int64)
    if total.size and total.min() < 0:
        raise BadInputError("a negative length", given=int(total.min()), allowed=">= 0")
    in_whole_rounds = total // (interleave * num_shards) * interleave
    left = total - in_whole_rounds * num_shards
    before = np.arange(num_shards, dtype=np.int64) * interleave
    in_last_round: npt.NDArray[np.int64] = np.clip(left[:, None] - before, 0, interleave)
    return in_whole_rounds[:, None] + in_last_round
