"""What a pool tells, in the words of KV events."""

from kvferry.cluster.kv_events_translation import kv_event
from kvferry.coordinator.pool_events import Cleared, GroupOrigin, Removed, Stored, StoredContent
from kvferry.proto.ids import BlockHash, BlockId, GroupId, pack_group
from kvferry.proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

X = BlockHash(bytes(range(32)))
Y = BlockHash(bytes(range(32, 64)))
X_SHORT = 0x18191A1B1C1D1E1F
Y_SHORT = 0x38393A3B3C3D3E3F


def test_stored_blocks_tell_their_tokens_keys_and_group() -> None:
    event = Stored(
        block_ids=(BlockId(3),),
        keys=(pack_group(Y, GroupId(1)),),
        parent=X,
        block_tokens=4,
        origin=GroupOrigin(GroupId(1), "sliding_window", 64),
        content=StoredContent((5, 6, 7, 8), (("salt", ("img", 0)),), 9, "adapter"),
    )
    made = BlockStored(
        block_hashes=(Y_SHORT,),
        parent_block_hash=X_SHORT,
        token_ids=(5, 6, 7, 8),
        block_size=4,
        lora_id=9,
        medium="GPU",
        lora_name="adapter",
        extra_keys=(("salt", ("img", 0)),),
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=64,
    )
    assert kv_event(event, "uint64") == made


def test_blocks_of_which_only_hashes_are_known_tell_no_tokens() -> None:
    event = Stored(
        block_ids=(BlockId(3), BlockId(4)),
        keys=(pack_group(X, GroupId(0)), pack_group(Y, GroupId(0))),
        block_tokens=4,
        origin=GroupOrigin(GroupId(0), "full_attention", None),
    )
    assert kv_event(event, "bytes") == BlockStored(
        block_hashes=(bytes(X), bytes(Y)),
        parent_block_hash=None,
        token_ids=(),
        block_size=4,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_removed_and_cleared_name_the_group_and_nothing_more() -> None:
    removed = Removed(BlockId(3), pack_group(X, GroupId(2)))
    assert kv_event(removed, "uint64") == BlockRemoved(
        block_hashes=(X_SHORT,), medium="GPU", group_idx=2
    )
    assert kv_event(Cleared(), "uint64") == AllBlocksCleared()
