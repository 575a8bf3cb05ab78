"""Whether messages hold what their classes declare, and a digest of those declarations.

For bytes that came from another process: Python would take anything for anything.
"""

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from kvferry.proto.errors import BadInputError, InvariantError

Check = Callable[[Any], bool]


def require_declared_types(message: object) -> None:
    """Refuse a message of which some field, however deep, holds another type than declared.

    Raises:
        BadInputError: naming the message's class and the first such field.
    """
    kind: Any = type(message)
    for name, check in _checks_of_fields(kind):
        value = getattr(message, name)
        if not check(value):
            raise BadInputError(
                f"{name} of a {kind.__name__} is of a wrong kind", given=repr(value)[:200]
            )


def digest_of_types(kinds: tuple[type[Any], ...]) -> bytes:
    """Return 16 bytes that are equal where all field names and types of the classes are."""
    seen: dict[type[Any], None] = {}
    for kind in kinds:
        _collect(kind, seen)
    text = ";".join(
        f"{kind.__name__}({','.join(f'{f.name}:{f.type}' for f in fields(kind))})" for kind in seen
    )
    return hashlib.sha256(text.encode()).digest()[:16]


def _collect(kind: Any, seen: dict[type[Any], None]) -> None:
    if isinstance(kind, type) and is_dataclass(kind):
        if kind not in seen:
            seen[kind] = None
            for hint in get_type_hints(kind).values():
                _collect(hint, seen)
        return
    for part in get_args(kind):
        _collect(part, seen)


@cache
def _checks_of_fields(kind: Any) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(kind))


def _check_of(kind: Any) -> Check:
    """Return what tells whether a value is of a declared type.

    Raises:
        InvariantError: a type that no message has had until now.
    """
    if isinstance(kind, NewType):
        return _check_of(kind.__supertype__)
    if isinstance(kind, type) and is_dataclass(kind):
        return _check_of_record(kind)
    if kind is float:
        return lambda value: type(value) in (int, float)
    if kind in (bool, int, str, bytes, NoneType):
        return lambda value: type(value) is kind
    return _check_of_composed(kind)


def _check_of_record(kind: Any) -> Check:
    checks = _checks_of_fields(kind)
    return lambda value: (
        type(value) is kind and all(check(getattr(value, name)) for name, check in checks)
    )


def _check_of_composed(kind: Any) -> Check:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value: type(value) is str and value in args
    if origin is tuple and args[1:] == (...,):
        return _many_of(args[0])
    parts = [_check_of(arg) for arg in args]
    if origin is tuple:
        return lambda value: (
            type(value) is tuple
            and len(value) == len(parts)
            and all(check(item) for check, item in zip(parts, value, strict=True))
        )
    if origin is dict:
        key, item = parts
        return lambda value: (
            type(value) is dict and all(key(k) and item(v) for k, v in value.items())
        )
    if origin in (Union, UnionType):
        return lambda value: any(part(value) for part in parts)
    raise InvariantError("messages cannot hold this type", given=str(kind))


def _many_of(kind: Any) -> Check:
    plain = kind.__supertype__ if isinstance(kind, NewType) else kind
    if plain in (int, str, bytes):
        # One look at the set of types: there may be many thousands.
        return lambda value: type(value) is tuple and set(map(type, value)) <= {plain}
    check = _check_of(kind)
    return lambda value: type(value) is tuple and all(map(check, value))
