"""What a block pool tells about its index: values that feed the location index."""

from typing import NamedTuple

from kvferry.proto.ids import BlockId, GroupedHash


class Stored(NamedTuple):
    """Blocks that became findable, one key per block, in chain order."""

    block_ids: tuple[BlockId, ...]
    keys: tuple[GroupedHash, ...]


class Removed(NamedTuple):
    """One physical block is no longer findable; another copy of the key may still be."""

    block_id: BlockId
    key: GroupedHash


class Cleared(NamedTuple):
    """Nothing of the pool is findable any more."""


PoolEvent = Stored | Removed | Cleared
