"""Token ids from whatever a caller holds to plain unsigned integers, or a refusal of the culprit.

The hash of a block depends on how its tokens are serialised, and numpy's or torch's integers
serialise differently from Python's (or not at all). So everything becomes one packed array of
64-bit unsigned integers before hashing. Tensors are recognised by their `tolist`, so torch is not
imported.
"""

import reprlib
from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from kvferry.proto.errors import TokenError

MAX_TOKEN = 2**64 - 1
"""The largest id CBOR writes as a plain unsigned integer."""

_PACKED = "Q"  # unsigned, 64 bits
_ALLOWED_TOKEN = f"integers from 0 to {MAX_TOKEN}"
_ALLOWED_TOKENS = "a one-dimensional sequence, array or tensor of integers"


def pack_tokens(tokens: object = (), *, who: str = "request") -> "array[int]":
    """Return the token ids as a new array of 64-bit unsigned integers (8 bytes each).

    Args:
        tokens: list, tuple, range or other sequence, numpy integer array, torch integer tensor;
            a sequence may hold numpy integers or 0-d tensors. One dimension, any length.
        who: whose tokens these are, for the error.

    Raises:
        TokenError: not such a sequence, or one of its values is no integer (bool and float
            included), negative or above `MAX_TOKEN`; names `who`, the position and the value.
    """
    if type(tokens) is np.ndarray and tokens.ndim == 1 and _has_only_tokens(tokens):
        packed = array(_PACKED)
        packed.frombytes(tokens.astype(np.uint64, order="C").view(np.uint8).data)
        return packed
    values = _as_list(tokens, who)
    # Types and range are checked at C speed over the usual case, a long list of plain ints: the
    # array refuses what is out of range, but would take a bool.
    if [*map(type, values)].count(int) != len(values):
        values = [_as_int(value, position, who) for position, value in enumerate(values)]
    try:
        return array(_PACKED, values)
    except OverflowError:
        position = next(i for i, value in enumerate(values) if not 0 <= value <= MAX_TOKEN)
        _refuse(values[position], position, who)


def _has_only_tokens(values: np.ndarray) -> bool:
    """Tell whether an array's type, or for signed integers its minimum, rules out a bad value."""
    kind = values.dtype.kind
    return kind == "u" or (kind == "i" and (not values.size or int(values.min()) >= 0))


def _as_list(tokens: object, who: str) -> list[int]:
    if not isinstance(tokens, (str, bytes, bytearray, memoryview)):
        if isinstance(tokens, list):
            return tokens
        if isinstance(tokens, Sequence):
            return list(tokens)
        values = _unwrapped(tokens)
        if isinstance(values, list):
            return values
    raise TokenError(
        f"the tokens of {who} are not a sequence of integers",
        given=f"{reprlib.repr(tokens)} ({type(tokens).__name__})",
        allowed=_ALLOWED_TOKENS,
    )


def _as_int(value: object, position: int, who: str) -> int:
    plain = _unwrapped(value)
    if type(plain) is not int:
        _refuse(value, position, who)
    return plain


def _unwrapped(value: object) -> object:
    """Return what an array, a tensor or one of their elements holds; other values as they are.

    So is a tensor without values to hand out (meta, sparse), which its caller then refuses.
    """
    tolist = getattr(value, "tolist", None)
    if not callable(tolist):
        return value
    try:
        return tolist()
    except Exception:  # each kind of array has errors of its own
        return value


def _refuse(value: object, position: int, who: str) -> NoReturn:
    shown = value if type(value) is int else f"{reprlib.repr(value)} ({type(value).__name__})"
    raise TokenError(
        f"{who} has a token that cannot be hashed",
        given={"position": position, "value": shown},
        allowed=_ALLOWED_TOKEN,
    )
