"""KV events as bytes: those of vLLM, in both encodings, read back as the same values."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockHash
from kvferry.proto.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    external_hash,
)
from kvferry.proto.kv_events_codec import EventEncoding, decode_batch, encode_batch

AA = b"\xaa" * 32
TOKENS = (1, 2, 3, 4)

BATCH_017 = KvEventBatch(
    ts=1.5,
    events=(
        BlockStored(
            block_hashes=(AA,),
            parent_block_hash=None,
            token_ids=TOKENS,
            block_size=4,
            extra_keys=(None,),
        ),
        BlockStored(block_hashes=(123,), parent_block_hash=7, token_ids=TOKENS, block_size=4),
        BlockRemoved(block_hashes=(AA,)),
        AllBlocksCleared(),
    ),
    data_parallel_rank=0,
)
# Recorded from vLLM 0.17.1.
ARRAY_017 = (
    "93cb3ff800000000000094"
    "99ab426c6f636b53746f72656491c420" + "aa" * 32 + "c0940102030404c0a3475055c091c0"
    "99ab426c6f636b53746f726564917b07940102030404c0a3475055c0c0"
    "93ac426c6f636b52656d6f76656491c420" + "aa" * 32 + "a3475055"
    "91b0416c6c426c6f636b73436c656172656400"
)

BATCH_032 = KvEventBatch(
    ts=1.5,
    events=(
        BlockStored(
            block_hashes=(AA,),
            parent_block_hash=None,
            token_ids=TOKENS,
            block_size=4,
            extra_keys=(None,),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored(block_hashes=(123,), parent_block_hash=7, token_ids=TOKENS, block_size=4),
        BlockStored(
            block_hashes=(2**64 - 1,),
            parent_block_hash=AA,
            token_ids=(70_000, 128),
            block_size=2,
            lora_id=3,
            medium="CPU",
            lora_name="ad",
            extra_keys=(("ad", ("img", -2), "salt", b"\x01"),),
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=128,
            locality="REMOTE",
            ownership="fs",
            session_id="s1",
        ),
        BlockRemoved(block_hashes=(AA,), group_idx=0),
        BlockRemoved(block_hashes=(5,), medium=None, group_idx=1, locality="LOCAL", ownership="fs"),
        AllBlocksCleared(),
    ),
    data_parallel_rank=0,
)
# What msgspec 0.23 writes for the event classes of vLLM 0.32.0.
MAP_032 = (
    "93cb3ff8000000000000968ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab1706172656e745f626c6f636b"
    "5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d65"
    "6469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b"
    "765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e88a474797065ab426c6f636b53"
    "746f726564ac626c6f636b5f686173686573917bb1706172656e745f626c6f636b5f6861736807a9746f6b656e"
    "5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72"
    "615f6e616d65c08fa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfffffffffff"
    "ffffffb1706172656e745f626c6f636b5f68617368c420aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "aaaaaaaaaaaaaaaaaaaaa9746f6b656e5f69647392ce00011170cc80aa626c6f636b5f73697a6502a76c6f7261"
    "5f696403a66d656469756da3435055a96c6f72615f6e616d65a26164aa65787472615f6b6579739194a2616492"
    "a3696d67fea473616c74c40101a967726f75705f69647801b26b765f63616368655f737065635f6b696e64ae73"
    "6c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f77cc80a8"
    "6c6f63616c697479a652454d4f5445a96f776e657273686970a26673aa73657373696f6e5f6964a2733184a474"
    "797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420aaaaaaaaaaaaaaaaaaaaaaaaaa"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa66d656469756da3475055a967726f75705f6964780086a47479"
    "7065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756dc0a967726f75705f"
    "69647801a86c6f63616c697479a54c4f43414ca96f776e657273686970a2667381a474797065b0416c6c426c6f"
    "636b73436c656172656400"
)

texts = st.text(max_size=5)
hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=16, max_size=32)
small = st.integers(0, 2**32 - 1)
plain_keys = texts | st.binary(max_size=4) | st.integers(-5, 5)
keys = st.lists(plain_keys | st.tuples(texts, st.integers(-5, 5)), max_size=3).map(tuple)


def tuples(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=3).map(tuple)


stored = st.builds(
    BlockStored,
    block_hashes=tuples(hashes),
    parent_block_hash=st.none() | hashes,
    token_ids=tuples(small),
    block_size=small,
    lora_id=st.none() | small,
    medium=st.none() | texts,
    lora_name=st.none() | texts,
    extra_keys=st.none() | tuples(st.none() | keys),
    group_idx=st.none() | small,
    kv_cache_spec_kind=st.none() | texts,
    kv_cache_spec_sliding_window=st.none() | small,
    locality=st.none() | texts,
    ownership=st.none() | texts,
    session_id=st.none() | texts,
)
removed = st.builds(
    BlockRemoved,
    block_hashes=tuples(hashes),
    medium=st.none() | texts,
    group_idx=st.none() | small,
    locality=st.none() | texts,
    ownership=st.none() | texts,
)
batches = st.builds(
    KvEventBatch,
    ts=st.floats(allow_nan=False),
    events=tuples(stored | removed | st.just(AllBlocksCleared())),
    data_parallel_rank=st.none() | small,
)


def wire(*events: object) -> bytes:
    packed: bytes = msgpack.packb([1.5, list(events), 0])
    return packed


def test_the_array_encoding_writes_the_bytes_recorded_from_vllm() -> None:
    assert encode_batch(BATCH_017, "array").hex() == ARRAY_017
    assert decode_batch(bytes.fromhex(ARRAY_017)) == BATCH_017


def test_the_map_encoding_leaves_out_optional_fields_that_are_none() -> None:
    assert encode_batch(BATCH_032, "map").hex() == MAP_032
    assert decode_batch(bytes.fromhex(MAP_032)) == BATCH_032


def test_a_batch_without_a_rank_still_has_three_places() -> None:
    empty = KvEventBatch(ts=2, events=())
    assert encode_batch(empty, "map").hex() == "93cb400000000000000090c0"
    assert decode_batch(bytes.fromhex("92cb400000000000000090")) == empty


def test_later_fields_follow_those_of_017_up_to_the_last_that_is_set() -> None:
    stored = BlockStored(
        block_hashes=(1,), parent_block_hash=None, token_ids=(9,), block_size=1, group_idx=2
    )
    removed = BlockRemoved(block_hashes=(1,), locality="LOCAL")
    _, events, _ = msgpack.unpackb(
        encode_batch(KvEventBatch(ts=0, events=(stored, removed)), "array")
    )
    assert events == [
        ["BlockStored", [1], None, [9], 1, None, "GPU", None, None, 2],
        ["BlockRemoved", [1], "GPU", None, "LOCAL"],
    ]


@given(batches, st.sampled_from(["array", "map"]))
def test_a_batch_of_either_encoding_is_read_back_equal(
    batch: KvEventBatch, encoding: EventEncoding
) -> None:
    assert decode_batch(encode_batch(batch, encoding)) == batch


def test_shorter_and_longer_arrays_and_unknown_fields_are_read() -> None:
    shortest = BlockStored(
        block_hashes=(1,), parent_block_hash=2, token_ids=(3,), block_size=1, medium=None
    )
    longer = ["BlockStored", [1], 2, [3], 1, *[None] * 10, "a field of 2027", 5]
    in_map = {"block_hashes": [1], "parent_block_hash": 2, "token_ids": [3], "block_size": 1}
    payload = wire(
        ["BlockStored", [1], 2, [3], 1],
        longer,
        {"type": "BlockStored", "lookahead_token_ids": [4], **in_map},
        ["BlockRemoved", [1]],
        ["AllBlocksCleared", "a reason"],
    )
    assert decode_batch(payload).events == (
        shortest,
        shortest,
        shortest,
        BlockRemoved(block_hashes=(1,), medium=None),
        AllBlocksCleared(),
    )


@pytest.mark.parametrize(
    "event",
    [
        ["BlockMoved", [1]],
        ["BlockRemoved"],
        ["BlockRemoved", [-1]],
        ["BlockRemoved", 1],
        ["BlockRemoved", [1], 5],
        ["BlockStored", [1], None, [1]],
        ["BlockStored", [1], "text", [1], 1],
        ["BlockStored", [1], None, [1.5], 1],
        ["BlockStored", [1], None, [1], 1, None, None, None, [[[[]]]]],
        {"block_hashes": [1]},
        {"type": ["BlockRemoved"], "block_hashes": [1]},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1},
        [],
        "BlockRemoved",
        None,
    ],
    ids=repr,
)
def test_an_event_that_is_none_is_refused(event: object) -> None:
    with pytest.raises(BadInputError, match="cannot be read; given: "):
        decode_batch(wire(event))


@pytest.mark.parametrize("batch", [[], [1.5], ["now", []], [1.5, {}], [1.5, [], "0"], 7, {}])
def test_a_batch_that_is_none_is_refused(batch: object) -> None:
    with pytest.raises(BadInputError, match="a batch that cannot be read"):
        decode_batch(msgpack.packb(batch))


def test_a_deeply_nested_payload_is_refused() -> None:
    for depth in (100, 900, 10_000):
        with pytest.raises(BadInputError):
            decode_batch(b"\x93\x01\x91" + b"\x91" * depth + b"\xc0\xc0")


@given(st.binary() | st.binary().map(lambda tail: bytes.fromhex(ARRAY_017)[: len(tail)] + tail))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except BadInputError:
        return


def test_a_value_without_a_place_in_msgpack_is_refused() -> None:
    for wrong in (2**64, object()):
        event = BlockRemoved(block_hashes=(wrong,))  # type: ignore[arg-type]
        with pytest.raises(BadInputError, match="msgpack cannot hold"):
            encode_batch(KvEventBatch(ts=0, events=(event,)), "map")


def test_a_hash_is_told_as_its_last_eight_bytes_or_as_all_of_them() -> None:
    block_hash = BlockHash(bytes(range(32)))
    assert external_hash(block_hash, "uint64") == 0x18191A1B1C1D1E1F
    assert external_hash(block_hash, "bytes") == bytes(range(32))
    assert external_hash(BlockHash(b"\xff" * 16), "uint64") == 2**64 - 1
    with pytest.raises(BadInputError, match="too short"):
        external_hash(BlockHash(b"1234567"), "uint64")
