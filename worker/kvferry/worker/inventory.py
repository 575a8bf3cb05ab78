"""What a worker holds, as it is told to a coordinator that does not know it."""

from collections.abc import Iterator
from typing import NamedTuple, cast

from kvferry.proto.ids import GROUP_ID_BYTES, BlockHash, BlockId, GroupId
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
        some, ids = keys[start : start + max_blocks], block_ids[start : start + max_blocks]
        # A key ends with its group. There may be millions of keys, and groups are few.
        for group in dict.fromkeys([key[-GROUP_ID_BYTES:] for key in some]):
            hashes = [key[:-GROUP_ID_BYTES] for key in some if key.endswith(group)]
            yield InventoryPart(
                GroupId(int.from_bytes(group, "big")),
                cast("list[BlockHash]", hashes),
                [block for block, key in zip(ids, some, strict=True) if key.endswith(group)],
            )
