"""Batches of KV events as vLLM's msgpack, in both of its encodings.

A batch is the array `[ts, [event, ...], data_parallel_rank]`. An event is

- `array` (vLLM up to 0.23): `["BlockStored", block_hashes, parent, ...]`, by position. The fields
  of 0.17 are always there; later ones follow, up to the last that is set.
- `map` (vLLM from 0.24): `{"type": "BlockStored", "block_hashes": ...}`, without the optional
  fields that are None.

The decoder needs no hint. It takes shorter arrays (what is missing is None) and longer ones, and
passes over fields of a map that it does not know, so that other versions can be read.
"""

import reprlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

import msgpack

from kvferry.proto.errors import BadInputError
from kvferry.proto.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
)

EventEncoding = Literal["array", "map"]

_KINDS: dict[str, type[KvEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
# In the order of the wire, which is the order of the classes.
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}
# How many fields, from the first, are written even when they are None.
_ALWAYS_IN_ARRAY = {BlockStored: 8, BlockRemoved: 2, AllBlocksCleared: 0}
_ALWAYS_IN_MAP = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}
# How many an event has in every version; one with fewer cannot be read.
_NEEDED = {BlockStored: 4, BlockRemoved: 1, AllBlocksCleared: 0}


def encode_batch(batch: KvEventBatch, encoding: EventEncoding) -> bytes:
    """Return the payload of one message.

    Raises:
        BadInputError: a value has no place in msgpack (an integer beyond 64 bits, another type).
    """
    as_wire = _event_to_map if encoding == "map" else _event_to_array
    wire = [float(batch.ts), [as_wire(event) for event in batch.events], batch.data_parallel_rank]
    try:
        packed: bytes = msgpack.packb(wire)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInputError(
            f"a batch of events that msgpack cannot hold: {error}",
            allowed="text, bytes, None and integers of 64 bits",
        ) from error
    return packed


def decode_batch(payload: bytes) -> KvEventBatch:
    """Return the batch of a payload in either encoding.

    Raises:
        BadInputError: not msgpack, or not a batch of events of the known kinds.
    """
    try:
        wire = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"a payload that is not msgpack: {error}", given=f"{len(payload)} bytes"
        ) from error
    if not isinstance(wire, tuple) or len(wire) < 2:
        raise _refused("a batch", wire, "an array of a time, events and a rank")
    rank = wire[2] if len(wire) > 2 else None
    if not _is_number(wire[0]) or not isinstance(wire[1], tuple) or not _is_int_or_none(rank):
        raise _refused("a batch", wire, "an array of a time, events and a rank")
    return KvEventBatch(
        ts=float(wire[0]),
        events=tuple(_event_from_wire(event) for event in wire[1]),
        data_parallel_rank=rank,
    )


def _event_to_array(event: KvEvent) -> list[Any]:
    kind = type(event)
    values = [getattr(event, name) for name in _NAMES[kind]]
    least = _ALWAYS_IN_ARRAY[kind]
    while len(values) > least and values[-1] is None:
        values.pop()
    return [kind.__name__, *values]


def _event_to_map(event: KvEvent) -> dict[str, Any]:
    kind = type(event)
    wire: dict[str, Any] = {"type": kind.__name__}
    for index, name in enumerate(_NAMES[kind]):
        value = getattr(event, name)
        if value is not None or index < _ALWAYS_IN_MAP[kind]:
            wire[name] = value
    return wire


def _event_from_wire(wire: Any) -> KvEvent:
    tag, values = _tag_and_values(wire)
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise _refused("an event", wire, f"one of the kinds {', '.join(_KINDS)}")
    names = _NAMES[kind]
    # What is optional here was not always so; a field that is not there is None, whatever the
    # default of the class.
    told = dict.fromkeys(names)
    if isinstance(values, dict):
        told |= {name: values[name] for name in names if name in values}
        num_told = next((i for i, name in enumerate(names) if name not in values), len(names))
    else:
        told |= dict(zip(names, values, strict=False))
        num_told = len(values)
    wrong = [name for name in names if not _CHECKS[name](told[name])]
    if wrong or num_told < _NEEDED[kind]:
        raise _refused(f"a {tag} event", wire, f"{', '.join(wrong or names)} as vLLM has them")
    made: KvEvent = kind(**told)  # type: ignore[arg-type]
    return made


def _tag_and_values(wire: Any) -> tuple[Any, Any]:
    if isinstance(wire, dict):
        return wire.get("type"), wire
    if isinstance(wire, tuple) and wire:
        return wire[0], wire[1:]
    return None, None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_int_or_none(value: Any) -> bool:
    return value is None or type(value) is int


def _is_text_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _is_hash(value: Any) -> bool:
    return type(value) is bytes or (type(value) is int and value >= 0)


def _are_plain(values: Any) -> bool:
    return type(values) is tuple and all(type(value) in (str, int, bytes) for value in values)


def _are_keys_of_block(values: Any) -> bool:
    return values is None or (
        type(values) is tuple
        and all(_are_plain(value if type(value) is tuple else (value,)) for value in values)
    )


def _are_extra_keys(value: Any) -> bool:
    return value is None or (type(value) is tuple and all(map(_are_keys_of_block, value)))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "block_hashes": lambda value: type(value) is tuple and all(map(_is_hash, value)),
    "parent_block_hash": lambda value: value is None or _is_hash(value),
    "token_ids": lambda value: type(value) is tuple and set(map(type, value)) <= {int},
    "block_size": lambda value: type(value) is int and value >= 0,
    "lora_id": _is_int_or_none,
    "medium": _is_text_or_none,
    "lora_name": _is_text_or_none,
    "extra_keys": _are_extra_keys,
    "group_idx": _is_int_or_none,
    "kv_cache_spec_kind": _is_text_or_none,
    "kv_cache_spec_sliding_window": _is_int_or_none,
    "locality": _is_text_or_none,
    "ownership": _is_text_or_none,
    "session_id": _is_text_or_none,
}


def _refused(what: str, given: Any, allowed: str) -> BadInputError:
    return BadInputError(f"{what} that cannot be read", given=reprlib.repr(given), allowed=allowed)
