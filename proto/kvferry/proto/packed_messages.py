"""Commands and replies as bytes, for processes that run the same kvferry.

A message becomes the list of its fields' values, in the order in which its class declares them,
and nested messages likewise; msgpack writes that. Nothing names a field or a class, so a step with
hundreds of requests in it is written and read in a fraction of what pickle takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    NewType,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from kvferry.proto.errors import BadInputError, InvariantError, KvferryError
from kvferry.proto.message_types import digest_of_types, require_declared_types
from kvferry.proto.messages import Command, Reply

SCHEMA = digest_of_types((*get_args(Command), *get_args(Reply)))
"""What both sides must have in common: rows name no fields."""

_PLAIN = (bool, int, float, str, bytes, NoneType)
_COMMANDS: tuple[Any, ...] = get_args(Command)
_REPLIES: tuple[Any, ...] = get_args(Reply)


class _Converter(NamedTuple):
    """Turns a value into what msgpack writes, and what it read into the value."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def pack_command(command: Command) -> bytes:
    """Return a command as bytes.

    Raises:
        InvariantError: no command.
        TypeError, OverflowError: a field holds what its type does not allow.

    """
    return _pack(command, _COMMANDS)


def unpack_command(packed: bytes) -> Command:
    """Return the command in bytes that may come from anywhere.

    Raises:
        BadInputError: they are no packed command, or a field is of a wrong kind.

    """
    try:
        command = cast("Command", _unpack(packed, _COMMANDS))
        require_declared_types(command)
    except KvferryError:
        raise
    except Exception as error:  # msgpack and the classes have many ways to refuse
        raise BadInputError(
            "not a packed command", given=f"{type(error).__name__}: {error}"[:200]
        ) from error
    return command


def pack_reply(reply: Reply) -> bytes:
    """Return a reply as bytes; errors as `pack_command`."""
    return _pack(reply, _REPLIES)


def unpack_reply(packed: bytes) -> Reply:
    """Return the reply that `pack_reply` packed, from a coordinator that is trusted.

    Field types are not looked at, and bytes of anything else fail in any way.
    """
    return cast("Reply", _unpack(packed, _REPLIES))


def _pack(message: object, kinds: tuple[Any, ...]) -> bytes:
    if type(message) not in kinds:
        raise InvariantError(
            "not a message",
            given=type(message).__name__,
            allowed=[kind.__name__ for kind in kinds],
        )
    number = kinds.index(type(message))
    packed: bytes = msgpack.packb((number, _record(kinds[number]).pack(message)))
    return packed


def _unpack(packed: bytes, kinds: tuple[Any, ...]) -> object:
    number, row = msgpack.unpackb(packed, use_list=False)
    return _record(kinds[number]).unpack(row)


@cache
def _record(kind: type[Any]) -> _Converter:
    """Return what turns a message into the row of its fields' values, and that back."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    found = {i: _converter(hints[name]) for i, name in enumerate(names)}
    nested = [(i, converter) for i, converter in found.items() if converter is not None]

    def pack(message: object) -> list[object]:
        row = [getattr(message, name) for name in names]
        for i, converter in nested:
            row[i] = converter.pack(row[i])
        return row

    def unpack(row: Sequence[object]) -> object:
        values = dict(zip(names, row, strict=True))
        for i, converter in nested:
            values[names[i]] = converter.unpack(row[i])
        return kind(**values)

    return _Converter(pack, unpack)


def _converter(kind: Any) -> _Converter | None:
    """Return what converts values of a field's type; None where msgpack does that.

    Raises:
        InvariantError: a type that no message has had until now.

    """
    if isinstance(kind, NewType):
        return _converter(kind.__supertype__)
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind)
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN or origin is Literal:
        return None
    if origin is tuple and args[1:] == (...,):
        return _of_many(_converter(args[0]))
    parts = [arg for arg in args if arg is not NoneType]
    if origin in (Union, UnionType) and len(parts) == 1:
        return _or_none(_converter(parts[0]))
    if origin in (tuple, dict, Union, UnionType) and not any(map(_converter, parts)):
        return None
    raise InvariantError("messages cannot hold this type", given=str(kind))


def _of_many(one: _Converter | None) -> _Converter | None:
    if one is None:
        return None
    pack, unpack = one
    return _Converter(
        lambda items: [pack(item) for item in items], lambda rows: tuple(map(unpack, rows))
    )


def _or_none(one: _Converter | None) -> _Converter | None:
    if one is None:
        return None
    pack, unpack = one
    return _Converter(
        lambda item: None if item is None else pack(item),
        lambda row: None if row is None else unpack(row),
    )
