"""What a pool tells, in the words of KV events."""

from kvferry.cluster.kv_events_translation import kv_events
from kvferry.coordinator.pool_events import Cleared, GroupOrigin, Removed, Stored, StoredContent
from kvferry.proto.ids import BlockHash, BlockId, GroupId
from kvferry.proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

X = BlockHash(bytes(range(32)))
Y = BlockHash(bytes(range(32, 64)))
X_SHORT = 0x18191A1B1C1D1E1F
Y_SHORT = 0x38393A3B3C3D3E3F


def test_stored_blocks_tell_their_tokens_keys_and_group() -> None:
    event = Stored(
        block_ids=(BlockId(3),),
        hashes=(Y,),
        group_id=GroupId(1),
        parent=X,
        block_tokens=4,
        origin=GroupOrigin("sliding_window", 64),
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
    assert list(kv_events([event], "uint64")) == [made]


def test_blocks_of_which_only_hashes_are_known_tell_no_tokens() -> None:
    event = Stored(
        block_ids=(BlockId(3), BlockId(4)),
        hashes=(X, Y),
        group_id=GroupId(0),
        block_tokens=4,
        origin=GroupOrigin("full_attention", None),
    )
    made = BlockStored(
        block_hashes=(bytes(X), bytes(Y)),
        parent_block_hash=None,
        token_ids=(),
        block_size=4,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert list(kv_events([event], "bytes")) == [made]


def test_removed_and_cleared_name_the_group_and_nothing_more() -> None:
    removed = Removed((BlockId(3), BlockId(4)), (X, Y), GroupId(2))
    assert list(kv_events([removed, Cleared()], "uint64")) == [
        BlockRemoved(block_hashes=(X_SHORT,), medium="GPU", group_idx=2),
        BlockRemoved(block_hashes=(Y_SHORT,), medium="GPU", group_idx=2),
        AllBlocksCleared(),
    ]
