"""What a block pool tells, in the words of KV events."""

from collections.abc import Iterable, Iterator
from typing import cast

from kvferry.coordinator.pool_events import MEDIUM, PoolEvent, Removed, Stored
from kvferry.proto.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    HashForm,
    KvEvent,
    external_hash,
)


def kv_events(events: Iterable[PoolEvent], form: HashForm) -> Iterator[KvEvent]:
    """Yield a pool's events as they are published, with hashes in `form`.

    Blocks of which only hashes are known (a client stored them, or a snapshot tells them) have no
    tokens. Removals are published one by one, as vLLM's are.
    """
    for event in events:
        if isinstance(event, Stored):
            yield _stored(event, form)
        elif isinstance(event, Removed):
            for block_hash in event.hashes:
                yield BlockRemoved(
                    block_hashes=(external_hash(block_hash, form),),
                    medium=MEDIUM,
                    group_idx=event.group_id,
                )
        else:
            yield AllBlocksCleared()


def _stored(event: Stored, form: HashForm) -> BlockStored:
    origin, content = event.origin, event.content
    return BlockStored(
        block_hashes=tuple(external_hash(block_hash, form) for block_hash in event.hashes),
        parent_block_hash=None if event.parent is None else external_hash(event.parent, form),
        token_ids=() if content is None else content.tokens,
        block_size=event.block_tokens,
        lora_id=None if content is None else content.lora_id,
        medium=MEDIUM,
        lora_name=None if content is None else content.lora_name,
        extra_keys=(
            None
            if content is None
            else cast("tuple[tuple[ExtraKey, ...] | None, ...] | None", content.extra)
        ),
        group_idx=event.group_id,
        kv_cache_spec_kind=None if origin is None else origin.kind,
        kv_cache_spec_sliding_window=None if origin is None else origin.window_tokens,
    )
