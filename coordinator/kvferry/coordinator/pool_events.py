"""What a block pool tells about its index: values that feed the location index and subscribers."""

from typing import NamedTuple

from kvferry.proto.ids import BlockHash, BlockId, GroupId

MEDIUM = "GPU"
"""The medium of everything that a pool tells: device memory, by the name vLLM's events use."""


class GroupOrigin(NamedTuple):
    """The kind of group whose blocks an event is about; `window_tokens` None without a window."""

    kind: str
    window_tokens: int | None


class StoredContent(NamedTuple):
    """What stored blocks hold, where the caller told it.

    `tokens`: every token of the run, those of blocks left out as well. `extra`: per stored block
    the extra keys without their tags, or None; None when there is no block.
    """

    tokens: tuple[int, ...]
    extra: tuple[tuple[object, ...] | None, ...] | None
    lora_id: int | None
    lora_name: str | None


class Stored(NamedTuple):
    """Blocks that became findable, one hash per block, in chain order.

    Blocks that hold nothing findable are left out, so there may be none. `parent` is the hash
    before the run's first block, None at the start of a chain. `block_tokens` is what one hash of
    the event covers. `content` is None where only hashes were told.
    """

    block_ids: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]
    group_id: GroupId
    parent: BlockHash | None = None
    block_tokens: int = 0
    origin: GroupOrigin | None = None
    content: StoredContent | None = None


class Removed(NamedTuple):
    """Blocks that are no longer findable under a hash, in order; other copies of it may still be.

    A block that was findable under several hashes is told once for each. Subscribers are told one
    removal per block.
    """

    block_ids: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]
    group_id: GroupId


class Cleared(NamedTuple):
    """Nothing of the pool is findable any more."""


PoolEvent = Stored | Removed | Cleared
