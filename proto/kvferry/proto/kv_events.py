"""What an engine tells the world about its prefix cache, in vLLM's terms.

These are the values; `kv_events_codec` has their bytes. The fields are those of vLLM 0.17 and
0.32 together: whatever a version does not know is None, which is also what it means there.
Sequences are tuples, so that a batch is a value: hashable, and safe in another thread.
"""

from dataclasses import dataclass
from typing import Literal

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockHash

HashForm = Literal["uint64", "bytes"]
ExternalHash = int | bytes
"""A block's hash as events carry it: an unsigned 64-bit integer, or all of its bytes."""

ExtraKey = str | int | bytes | tuple[str | int | bytes, ...]
"""One extra key without its tag: an adapter's name, (identifier, offset), a salt, a digest."""

INT_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A run of blocks that became findable, in chain order.

    `token_ids` are all tokens of the run, `block_size` of them per block, counted over all ranks
    of the instance. Where blocks of the run hold nothing findable (a window's start), there are
    fewer hashes than `len(token_ids) / block_size`. `extra_keys` has one entry per hash.
    `parent_block_hash` is None at the start of a chain. `lora_id` is for old readers only.
    `kv_cache_spec_sliding_window` is in tokens.
    """

    block_hashes: tuple[ExternalHash, ...]
    parent_block_hash: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One physical copy of each hash is no longer findable; another copy may still be."""

    block_hashes: tuple[ExternalHash, ...]
    medium: str | None = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing that was told before is findable any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """The events of one engine step. `ts` is the wall clock in seconds since 1970."""

    ts: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


def external_hash(block_hash: BlockHash, form: HashForm) -> ExternalHash:
    """Return a hash as events carry it; `uint64` keeps its last 8 bytes, big-endian.

    Raises:
        BadInputError: the hash is shorter than 8 bytes.
    """
    if len(block_hash) < INT_HASH_BYTES:
        raise BadInputError(
            "a block hash is too short", given=len(block_hash), allowed=f">= {INT_HASH_BYTES} bytes"
        )
    if form == "bytes":
        return bytes(block_hash)
    return int.from_bytes(block_hash[-INT_HASH_BYTES:], "big")
