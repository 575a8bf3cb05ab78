"""Commands and replies as bytes, for processes that run the same kvferry: Ray's.

A message becomes the list of its fields' values, in the order in which its class declares them,
and nested messages likewise; msgpack writes that. Nothing names a field or a class, so a step with
hundreds of requests in it is written and read in a fraction of what pickle takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, NewType, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from kvferry.proto.errors import InvariantError
from kvferry.proto.messages import Command, Reply

_Convert = Callable[[Any], Any]
_PLAIN = (bool, int, float, str, bytes, NoneType)
_COMMANDS: tuple[type, ...] = get_args(Command)
_REPLIES: tuple[type, ...] = get_args(Reply)


def pack_command(command: Command) -> bytes:
    """Return a command as bytes.

    Raises:
        TypeError, OverflowError: a field holds what its type does not allow.

    """
    return _pack(command, _COMMANDS)


def unpack_command(packed: bytes) -> Command:
    """Return the command that `pack_command` packed."""
    return cast("Command", _unpack(packed, _COMMANDS))


def pack_reply(reply: Reply) -> bytes:
    """Return a reply as bytes; errors as `pack_command`."""
    return _pack(reply, _REPLIES)


def unpack_reply(packed: bytes) -> Reply:
    """Return the reply that `pack_reply` packed."""
    return cast("Reply", _unpack(packed, _REPLIES))


def _pack(message: object, kinds: tuple[type, ...]) -> bytes:
    kind = type(message)
    if kind not in kinds:
        raise InvariantError(
            "not a message", given=kind.__name__, allowed=[known.__name__ for known in kinds]
        )
    to_row, _ = _record(kind)
    packed: bytes = msgpack.packb((kinds.index(kind), to_row(message)))
    return packed


def _unpack(packed: bytes, kinds: tuple[type, ...]) -> object:
    number, row = msgpack.unpackb(packed, use_list=False)
    _, from_row = _record(kinds[number])
    return from_row(row)


@cache
def _record(kind: type) -> tuple[_Convert, _Convert]:
    """Return what turns a message into the row of its values, and what turns that back."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    converters = {i: _converters(hints[name]) for i, name in enumerate(names)}
    nested = [(i, to, back) for i, (to, back) in converters.items() if to is not None]
    get = attrgetter(*names, names[0]) if names else None  # two names at least: always a tuple

    def to_row(message: object) -> Sequence[object]:
        row = list(get(message)[:-1]) if get is not None else []
        for i, to, _ in nested:
            row[i] = to(row[i])
        return row

    def from_row(row: Sequence[object]) -> object:
        values = dict(zip(names, row, strict=True))
        for i, _, back in nested:
            values[names[i]] = back(row[i])
        return kind(**values)

    return to_row, from_row


def _converters(kind: Any) -> tuple[_Convert, _Convert] | tuple[None, None]:
    """Return what converts values of a field's type, both ways; None where msgpack does that.

    Raises:
        InvariantError: a type that no message has had until now.

    """
    if isinstance(kind, NewType):
        return _converters(kind.__supertype__)
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind)
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN or origin is Literal:
        return None, None
    if origin is tuple:
        return _of_many(args[0]) if args[1:] == (...,) else _all_plain(args)
    if origin is dict:
        return _all_plain(args)
    if origin in (Union, UnionType):
        rest = [arg for arg in args if arg is not NoneType]
        return _or_none(rest[0]) if len(rest) == 1 else _all_plain(rest)
    raise InvariantError("messages cannot hold this type", given=str(kind))


def _all_plain(kinds: Sequence[Any]) -> tuple[None, None]:
    for kind in kinds:
        if _converters(kind) != (None, None):
            raise InvariantError("messages cannot hold this type here", given=str(kind))
    return None, None


def _of_many(kind: Any) -> tuple[_Convert, _Convert] | tuple[None, None]:
    to, back = _converters(kind)
    if to is None or back is None:
        return None, None
    return (lambda items: [to(item) for item in items], lambda rows: tuple(map(back, rows)))


def _or_none(kind: Any) -> tuple[_Convert, _Convert] | tuple[None, None]:
    to, back = _converters(kind)
    if to is None or back is None:
        return None, None
    return (
        lambda item: None if item is None else to(item),
        lambda row: None if row is None else back(row),
    )
