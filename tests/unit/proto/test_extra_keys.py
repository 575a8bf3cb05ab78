import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError
from kvferry.proto.extra_keys import (
    NO_KEYS,
    LoraKey,
    MultimodalItem,
    PromptEmbeds,
    RequestKeys,
    block_extra_keys,
)
from kvferry.proto.scheme import KeyFormat

LORA = LoraKey(name="sql", path="/adapters/sql")
IMAGE = MultimodalItem(identifier="img-a", offset=2, length=4)
EMBEDS = PromptEmbeds(raw=bytes(range(12)), bytes_per_token=2)
ALL = RequestKeys(lora=LORA, salt="tenant", multimodal=(IMAGE,), prompt_embeds=EMBEDS)


def item(identifier: str, offset: int, length: int) -> MultimodalItem:
    return MultimodalItem(identifier=identifier, offset=offset, length=length)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize("key_format", ["0.32", "0.17"])
def test_a_plain_request_has_no_extra_keys(key_format: KeyFormat) -> None:
    assert block_extra_keys(key_format, NO_KEYS, 0, 4) is None
    assert block_extra_keys(key_format, RequestKeys(), 4, 8) is None


def test_the_tagged_format_lists_adapter_image_salt_and_embeds_in_this_order() -> None:
    assert block_extra_keys("0.32", ALL, 0, 4) == (
        ("lora", "sql", "/adapters/sql"),
        ("mm", "img-a", 2),
        ("cache_salt", "tenant"),
        ("prompt_embeds", sha256(bytes(range(8)))),
    )


def test_the_flat_format_lists_the_same_without_tags_path_and_position() -> None:
    assert block_extra_keys("0.17", ALL, 0, 4) == (
        "sql",
        "img-a",
        "tenant",
        sha256(bytes(range(8))),
    )


def test_later_blocks_have_no_salt_and_count_the_image_from_their_own_start() -> None:
    assert block_extra_keys("0.32", ALL, 4, 8) == (
        ("lora", "sql", "/adapters/sql"),
        ("mm", "img-a", -2),
        ("prompt_embeds", sha256(bytes(range(8, 12)))),
    )


def test_blocks_after_prompt_embeds_carry_the_digest_of_nothing() -> None:
    keys = RequestKeys(prompt_embeds=EMBEDS)
    assert block_extra_keys("0.32", keys, 8, 12) == (("prompt_embeds", sha256(b"")),)


def test_a_version_makes_an_adapter_key_that_no_unversioned_one_equals() -> None:
    versioned = RequestKeys(lora=LoraKey(name="sql", path="/adapters/sql", version="v2"))
    assert block_extra_keys("0.32", versioned, 0, 4) == (("lora", "sql", "/adapters/sql", "v2"),)
    assert block_extra_keys("0.17", versioned, 0, 4) == (("lora", "sql", "v2"),)


@pytest.mark.parametrize("key_format", ["0.32", "0.17"])
def test_an_image_that_ends_where_a_block_starts_is_not_part_of_it(key_format: KeyFormat) -> None:
    keys = RequestKeys(multimodal=(item("img-a", 1, 3),))
    assert block_extra_keys(key_format, keys, 4, 8) is None


def test_only_the_flat_format_marks_the_block_after_an_image_that_ended_where_hashing_stopped() -> (
    None
):
    keys = RequestKeys(multimodal=(item("img-a", 1, 3),))
    assert block_extra_keys("0.17", keys, 4, 8, resumed_at=4) == ("img-a",)
    assert block_extra_keys("0.17", keys, 8, 12, resumed_at=4) is None
    assert block_extra_keys("0.32", keys, 4, 8, resumed_at=4) is None


def test_only_the_flat_format_forgets_earlier_images_when_hashing_resumes() -> None:
    keys = RequestKeys(multimodal=(item("img-a", 4, 1), item("img-b", 5, 1)))
    assert block_extra_keys("0.17", keys, 4, 8) == ("img-a", "img-b")
    assert block_extra_keys("0.17", keys, 4, 8, resumed_at=4) == ("img-b",)
    assert block_extra_keys("0.32", keys, 4, 8, resumed_at=4) == (
        ("mm", "img-a", 0),
        ("mm", "img-b", 1),
    )


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6),
    st.integers(0, 40),
    st.integers(1, 8),
)
def test_a_block_names_exactly_the_items_that_share_a_token_with_it(
    gaps_and_lengths: list[tuple[int, int]], start: int, size: int
) -> None:
    items, offset = [], 0
    for number, (gap, length) in enumerate(gaps_and_lengths):
        items.append(item(f"item-{number}", offset + gap, length))
        offset = items[-1].end
    block = set(range(start, start + size))
    expected = [
        ("mm", it.identifier, it.offset - start)
        for it in items
        if block & set(range(it.offset, it.offset + it.length))
    ]
    keys = RequestKeys(multimodal=tuple(items))
    assert block_extra_keys("0.32", keys, start, start + size) == (tuple(expected) or None)


@pytest.mark.parametrize(
    ("first", "second"),
    [(item("a", 0, 4), item("b", 3, 1)), (item("a", 5, 1), item("b", 0, 1))],
    ids=["overlap", "order"],
)
def test_items_out_of_order_or_overlapping_are_refused(
    first: MultimodalItem, second: MultimodalItem
) -> None:
    with pytest.raises(BadInputError) as caught:
        RequestKeys(multimodal=(first, second))
    assert caught.value.given == [
        ["a", first.offset, first.length],
        ["b", second.offset, second.length],
    ]


def test_items_that_touch_are_taken() -> None:
    assert RequestKeys(multimodal=(item("a", 0, 4), item("b", 4, 1))).multimodal[1].end == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lora": "x"}, "the adapter must be a LoraKey; given: 'x'"),
        ({"multimodal": ("a",)}, "a multimodal item must be a MultimodalItem; given: 'a'"),
        ({"multimodal": (IMAGE, None)}, "a multimodal item must be a MultimodalItem; given: None"),
        ({"multimodal": None}, "the multimodal items must be a tuple; given: None"),
        ({"multimodal": [IMAGE]}, r"the multimodal items must be a tuple; given: \[Multimodal"),
        ({"prompt_embeds": b"e"}, "prompt embeds must be a PromptEmbeds; given: b'e'"),
        ({"salt": 5}, "a salt must be a text; given: 5"),
    ],
)
def test_a_field_of_a_wrong_kind_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        RequestKeys(**wrong)


@pytest.mark.parametrize("field", ["name", "path", "version"])
@pytest.mark.parametrize("value", [None, 5, b"n"])
def test_an_adapters_field_that_is_no_text_is_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {"name": "n", "path": "p", "version": "v", field: value}
    with pytest.raises(BadInputError, match=f"the {field} of an adapter") as caught:
        LoraKey(**fields)
    assert caught.value.given == repr(value)


@pytest.mark.parametrize("keys", [None, {"salt": "s"}])
def test_what_is_no_keys_of_a_request_is_refused(keys: Any) -> None:
    with pytest.raises(BadInputError, match="keys of a request must be a RequestKeys") as caught:
        block_extra_keys("0.32", keys, 0, 4)
    assert caught.value.given == repr(keys)


def test_an_empty_salt_is_refused_because_it_would_share_with_everybody() -> None:
    with pytest.raises(BadInputError, match="a salt must be a text; given: ''"):
        RequestKeys(salt="")


@pytest.mark.parametrize("salt", [5, b"s", "\ud800"], ids=["int", "bytes", "lone surrogate"])
def test_a_salt_that_is_no_text_is_refused(salt: object) -> None:
    with pytest.raises(BadInputError, match="a salt must be a text"):
        RequestKeys(salt=salt)  # type: ignore[arg-type]


def test_an_adapter_without_a_name_is_refused() -> None:
    with pytest.raises(BadInputError, match="the name of an adapter"):
        LoraKey(name="", path="/p")


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (True, 1), (0, 1.0)])
def test_an_item_with_a_bad_range_is_refused(offset: int, length: int) -> None:
    with pytest.raises(BadInputError, match="of a multimodal item must be an integer"):
        item("a", offset, length)


def test_prompt_embeds_of_half_a_token_are_refused() -> None:
    with pytest.raises(BadInputError) as caught:
        PromptEmbeds(raw=bytes(5), bytes_per_token=2)
    assert caught.value.given == 5


def test_prompt_embeds_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(BadInputError) as caught:
        PromptEmbeds(raw=bytearray(4), bytes_per_token=2)  # type: ignore[arg-type]
    assert caught.value.given == "bytearray"
