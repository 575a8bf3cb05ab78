"""Token ids from whatever a caller holds to plain ints, or a refusal that names the culprit.

The hash of a block depends on how its tokens are serialised, and numpy's or torch's integers
serialise differently from Python's (or not at all). So everything becomes `int` before hashing.
Arrays and tensors are recognised by their `tolist`, so neither numpy nor torch is imported.
"""

import reprlib
from collections.abc import Sequence
from typing import NoReturn

from kvferry.proto.errors import TokenError

MAX_TOKEN = 2**64 - 1
"""The largest id CBOR writes as a plain unsigned integer."""

_ALLOWED_TOKEN = f"integers from 0 to {MAX_TOKEN}"
_ALLOWED_TOKENS = "a one-dimensional sequence, array or tensor of integers"


def normalise_tokens(tokens: object, *, who: str = "request") -> list[int]:
    """Return the token ids as a new list of plain ints.

    Args:
        tokens: list, tuple, range or other sequence, numpy integer array, torch integer tensor;
            a sequence may hold numpy integers or 0-d tensors. One dimension, any length.
        who: whose tokens these are, for the error.

    Raises:
        TokenError: not such a sequence, or one of its values is no integer (bool and float
            included), negative or above `MAX_TOKEN`; names `who`, the position and the value.
    """
    values = _as_list(tokens, who)
    # Both checks run at C speed over the usual case, a long list of plain ints.
    if set(map(type, values)) - {int}:
        values = [_as_int(value, position, who) for position, value in enumerate(values)]
    if values and (min(values) < 0 or max(values) > MAX_TOKEN):
        position = next(i for i, value in enumerate(values) if not 0 <= value <= MAX_TOKEN)
        _refuse(values[position], position, who)
    return values


def _as_list(tokens: object, who: str) -> list[int]:
    if not isinstance(tokens, (str, bytes, bytearray, memoryview)):
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
