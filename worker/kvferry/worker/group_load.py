"""Which blocks of a sequence are to be filled, and by which hashes both sides know them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.proto.ids import BlockHash, BlockId, GroupId
from kvferry.proto.shared_chain import block_keys, blocks_of_range, hashes_per_block
from kvferry.proto.step_messages import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Consecutive blocks of a sequence to be filled, of one group, on every rank of an instance.

    `block_ids[i]` is the sequence's block `first_block + i`, and will be found by `hashes[i]`. The
    same tokens lie in the source's blocks from `first_source_block` on, which are found there by
    `source_hashes`.
    """

    group_id: GroupId
    first_block: int
    block_ids: Sequence[BlockId]
    hashes: Sequence[BlockHash]
    first_source_block: int
    source_hashes: Sequence[BlockHash]


def load_of_move(move: Move) -> GroupLoad:
    """Return the load that carries out a move.

    Its blocks need not follow one another in any sequence; as they are whole and cover as much at
    both sides, they lie in each other in the same way wherever they stand.
    """
    return GroupLoad(
        group_id=move.group_id,
        first_block=0,
        block_ids=move.block_ids,
        hashes=move.hashes,
        first_source_block=0,
        source_hashes=move.hashes,
    )


def group_load(
    chain: Sequence[BlockHash],
    group_id: GroupId,
    block_ids: Sequence[BlockId],
    *,
    first_block: int,
    block_tokens: int,
    source_block_tokens: int,
    hash_block_tokens: int,
) -> GroupLoad:
    """Return the load that fills a sequence's blocks from `first_block` on.

    Args:
        chain: the sequence's hashes, as far as the source's last block is covered.
        group_id: the group.
        block_ids: the destination blocks.
        first_block: which block of the sequence the first of them is.
        block_tokens: tokens of a (virtual) block here.
        source_block_tokens: tokens of a (virtual) block at the source.
        hash_block_tokens: tokens of one hash.

    Raises:
        ConfigError: blocks of either side that are no multiple of a hash.
    """
    own, theirs = (
        hashes_per_block(size, hash_block_tokens) for size in (block_tokens, source_block_tokens)
    )
    end_block = first_block + len(block_ids)
    source = blocks_of_range(
        first_block * block_tokens, end_block * block_tokens, source_block_tokens
    )
    return GroupLoad(
        group_id=group_id,
        first_block=first_block,
        block_ids=block_ids,
        hashes=block_keys(chain[first_block * own : end_block * own], own),
        first_source_block=source.start,
        source_hashes=block_keys(chain[source.start * theirs : source.stop * theirs], theirs),
    )
