import array
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import TokenError
from kvferry.proto.tokens import MAX_TOKEN, pack_tokens


class Word(IntEnum):
    FIRST = 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(min_value=0, max_value=MAX_TOKEN)))
def test_plain_ints_come_back_as_they_were(tokens: list[int]) -> None:
    assert pack_tokens(tokens).tolist() == tokens
    assert pack_tokens(tuple(tokens)).tolist() == tokens
    assert pack_tokens(np.array(tokens, dtype=np.uint64)).tolist() == tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        array.array("I", [1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        np.array([1, 2, 3], dtype=np.int32),
        np.array([1, 2, 3], dtype=np.int64),
        np.arange(1, 7)[:3],
        [np.int64(1), 2, np.uint16(3)],
        [np.array(1), np.array(2), np.array(3)],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_integer_form_becomes_the_same_64_bit_unsigned_integers(tokens: object) -> None:
    packed = pack_tokens(tokens)
    assert packed.tolist() == [1, 2, 3]
    assert (packed.typecode, packed.itemsize) == ("Q", 8)


def test_the_packed_tokens_of_an_array_are_their_own() -> None:
    source = np.array([1, 2**32, MAX_TOKEN], dtype=np.uint64)
    packed = pack_tokens(source)
    source[0] = 9
    assert packed.tolist() == [1, 2**32, MAX_TOKEN]
    assert pack_tokens(np.array([1, 2], dtype=">u4")[::-1]).tolist() == [2, 1]


def test_a_negative_value_of_a_signed_array_is_refused_by_position() -> None:
    with pytest.raises(TokenError) as caught:
        pack_tokens(np.array([4, 5, -3], dtype=np.int32))
    assert caught.value.given == {"position": 2, "value": -3}


def test_no_tokens_are_no_error() -> None:
    assert pack_tokens([]).tolist() == []
    assert pack_tokens(np.array([], dtype=np.int64)).tolist() == []


def test_the_borders_of_the_allowed_range_are_taken() -> None:
    assert pack_tokens([0, 2**64 - 1]).tolist() == [0, 2**64 - 1]


@pytest.mark.parametrize(
    ("culprit", "shown"),
    [
        (True, "True (bool)"),
        (False, "False (bool)"),
        (1.0, "1.0 (float)"),
        (float("nan"), "nan (float)"),
        ("7", "'7' (str)"),
        (None, "None (NoneType)"),
        ([7], "[7] (list)"),
        (Word.FIRST, "<Word.FIRST: 1> (Word)"),
        (np.bool_(True), "np.True_ (bool)"),
        (np.float32(1.0), "np.float32(1.0) (float32)"),
        (np.array([7]), "array([7]) (ndarray)"),
        (-1, -1),
        (2**64, 2**64),
        (np.int64(-2), -2),
    ],
    ids=repr,
)
def test_a_bad_token_is_refused_by_owner_position_and_value(culprit: object, shown: object) -> None:
    with pytest.raises(TokenError) as caught:
        pack_tokens([5, 6, culprit, 7], who="request r-9")
    assert "request r-9" in caught.value.message
    assert caught.value.given == {"position": 2, "value": shown}
    assert caught.value.allowed == "integers from 0 to 18446744073709551615"


@pytest.mark.parametrize(
    "tokens",
    [np.array([True]), np.array([1.0]), np.array([[1]]), np.array(["1"])],
    ids=["bool", "float", "two dimensions", "text"],
)
def test_an_array_of_anything_but_integers_is_refused_at_its_first_element(
    tokens: object,
) -> None:
    with pytest.raises(TokenError) as caught:
        pack_tokens(tokens)
    assert caught.value.given["position"] == 0


@pytest.mark.parametrize(
    "tokens",
    ["123", b"123", bytearray(b"1"), memoryview(b"1"), 5, None, {1: 2}, {1, 2}, np.int64(5)],
    ids=lambda tokens: type(tokens).__name__,
)
def test_what_is_no_sequence_of_integers_is_refused_with_its_type(tokens: object) -> None:
    with pytest.raises(TokenError, match="tokens of request r-9 are not a sequence") as caught:
        pack_tokens(tokens, who="request r-9")
    assert f"({type(tokens).__name__})" in caught.value.given


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(3, dtype=torch.int64, device="meta"),
        torch.ones(3, dtype=torch.int64).to_sparse(),
    ],
    ids=["meta", "sparse"],
)
def test_a_tensor_without_values_to_hand_out_is_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(TokenError, match="tokens of request are not a sequence") as caught:
        pack_tokens(tokens)
    assert caught.value.given.endswith("(Tensor)")
    with pytest.raises(TokenError) as caught:
        pack_tokens([5, tokens])
    assert caught.value.given["position"] == 1


def test_a_huge_culprit_is_shown_shortened() -> None:
    with pytest.raises(TokenError) as caught:
        pack_tokens([1, "x" * 10_000])
    assert len(str(caught.value)) < 300
