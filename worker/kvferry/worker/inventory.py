"""What a worker holds, as it is told to a coordinator that does not know it."""

from collections.abc import Iterator
from typing import NamedTuple

from kvferry.proto.ids import BlockHash, BlockId, GroupId, unpack_group
from kvferry.worker.residency import Residency


class InventoryPart(NamedTuple):
    """Blocks of one group with what they hold, written first first."""

    group_id: GroupId
    hashes: list[BlockHash]
    block_ids: list[BlockId]


def inventory_parts(residency: Residency, max_blocks: int) -> Iterator[InventoryPart]:
    """Yield all that is held now, what was written first first, as far as groups do not alternate.

    Args:
        residency: of the worker.
        max_blocks: most blocks of a part.
    """
    block_ids, keys = residency.inventory()
    for start in range(0, len(keys), max_blocks):
        some = slice(start, start + max_blocks)
        parts: dict[GroupId, InventoryPart] = {}
        for block_id, key in zip(block_ids[some], keys[some], strict=True):
            block_hash, group_id = unpack_group(key)
            part = parts.get(group_id)
            if part is None:
                part = parts[group_id] = InventoryPart(group_id, [], [])
            part.hashes.append(block_hash)
            part.block_ids.append(block_id)
        yield from parts.values()
