"""One hash chain for instances whose blocks cover different numbers of tokens.

The chain has one hash per `hash_block_tokens`; every (virtual) block is a multiple of it, and is
found by the last hash it covers: that hash stands for the block's tokens and all before them.
Blocks of two instances are matched by the positions they cover, never by their number in a list.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.ids import BlockHash
from kvferry.proto.specs import require_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """Positions [start, end) of the sequence, all in block `block` of an instance.

    Blocks are counted from the sequence's first.
    """

    block: int
    start: int
    end: int


def hashes_per_block(virtual_block_tokens: int, hash_block_tokens: int) -> int:
    """Return how many hashes of the chain a virtual block covers.

    Raises:
        ConfigError: a size that is no positive integer, or a block that is no multiple of a hash.
    """
    require_integer("hash_block_tokens", hash_block_tokens, at_least=1)
    require_integer("virtual_block_tokens", virtual_block_tokens, at_least=1)
    if virtual_block_tokens % hash_block_tokens:
        raise ConfigError(
            "a virtual block must be a multiple of a hash block",
            given={"virtual_block_tokens": virtual_block_tokens},
            allowed={"multiples of hash_block_tokens": hash_block_tokens},
        )
    return virtual_block_tokens // hash_block_tokens


def block_keys(
    hashes: Sequence[BlockHash], *, virtual_block_tokens: int, hash_block_tokens: int
) -> tuple[BlockHash, ...]:
    """Return the hashes that an instance's blocks are found by: the last of each whole block.

    Args:
        hashes: the chain from the sequence's first token, one per `hash_block_tokens`.
        virtual_block_tokens: tokens that one block id of the instance covers over all its ranks.
        hash_block_tokens: tokens of one hash.

    Raises:
        ConfigError: as `hashes_per_block`.
    """
    covered = hashes_per_block(virtual_block_tokens, hash_block_tokens)
    return tuple(hashes[covered - 1 :: covered])


def blocks_of_range(start: int, end: int, virtual_block_tokens: int) -> range:
    """Return the blocks that hold any of the positions [start, end).

    Raises:
        BadInputError: no range of positions.
    """
    if not 0 <= start <= end:
        raise BadInputError(
            "no range of positions", given=f"[{start}, {end})", allowed="0 <= start <= end"
        )
    if start == end:
        return range(0)
    return range(start // virtual_block_tokens, -(-end // virtual_block_tokens))


def source_parts(
    start: int, end: int, *, source_block_tokens: int, destination_block_tokens: int
) -> dict[int, tuple[BlockPart, ...]]:
    """Return, for each destination block in [start, end), the parts of source blocks it needs.

    The parts of a block cover exactly its positions within the range, in order. A source block is
    part of several destination blocks where it is larger; of a larger destination block each part
    is a source block of its own.

    Args:
        start: first position.
        end: end of the positions.
        source_block_tokens: tokens of a source's virtual block.
        destination_block_tokens: tokens of a destination's virtual block.

    Raises:
        BadInputError: no range of positions.
    """
    parts = {}
    for block in blocks_of_range(start, end, destination_block_tokens):
        first = max(start, block * destination_block_tokens)
        last = min(end, (block + 1) * destination_block_tokens)
        parts[block] = tuple(
            BlockPart(
                block=source,
                start=max(first, source * source_block_tokens),
                end=min(last, (source + 1) * source_block_tokens),
            )
            for source in blocks_of_range(first, last, source_block_tokens)
        )
    return parts


def usable_tokens(
    num_source_blocks: int, *, source_block_tokens: int, destination_block_tokens: int
) -> int:
    """Return the tokens of whole destination blocks that a prefix of source blocks can fill.

    The rest of the prefix would end inside a destination block, and no hash stands for a part of a
    block.
    """
    held = num_source_blocks * source_block_tokens
    return held // destination_block_tokens * destination_block_tokens
