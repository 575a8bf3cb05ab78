"""One hash chain for instances whose blocks cover different numbers of tokens.

The chain has one hash per `hash_block_tokens`; every (virtual) block is a multiple of it, and is
found by the last hash it covers: that hash stands for the block's tokens and all before them.
Blocks of two instances are matched by the positions they cover, never by their number in a list.
"""

from collections.abc import Sequence

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.ids import BlockHash
from kvferry.proto.specs import require_integer


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


def block_keys(hashes: Sequence[BlockHash], num_covered: int) -> tuple[BlockHash, ...]:
    """Return the hashes that an instance's blocks are found by: the last of each whole block.

    Args:
        hashes: the chain, from the beginning of a block.
        num_covered: hashes that a block covers (`hashes_per_block`).
    """
    return tuple(hashes[num_covered - 1 :: num_covered])


def blocks_of_range(start: int, end: int, block_tokens: int) -> range:
    """Return the blocks, of so many tokens each, that hold any of the positions [start, end).

    Raises:
        BadInputError: no range of positions.
    """
    if not 0 <= start <= end:
        raise BadInputError(
            "no range of positions", given=f"[{start}, {end})", allowed="0 <= start <= end"
        )
    if start == end:
        return range(0)
    return range(start // block_tokens, -(-end // block_tokens))
