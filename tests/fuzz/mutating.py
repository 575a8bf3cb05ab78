"""Messages that a broken or hostile peer could send: valid ones, damaged in some way."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

HUGE = (0, 1, 2, 127, 128, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62)
UNSIGNED_64 = (1 << 64) - 1
MAX_GROWTH_BYTES = 1 << 16

Damage = Callable[[Random, bytes], bytes]


def damaged(random: Random, message: bytes) -> bytes:
    """Return a message after one to four damages, or bytes at random."""
    if random.random() < 0.02:
        return random.randbytes(random.randrange(200))
    for _ in range(random.choice((1, 1, 2, 4))):
        message = random.choice(DAMAGES)(random, message)
    return message


def disordered(random: Random, messages: Sequence[bytes]) -> list[bytes]:
    """Return a stream with messages lost, repeated, out of order, or its end cut off."""
    stream = list(messages)
    for _ in range(random.choice((0, 1, 1, 2))):
        at = random.randrange(len(stream) + 1)
        what = random.randrange(4)
        if what == 0:
            del stream[at : at + 1]
        elif what == 1:
            stream.insert(at, random.choice(messages))
        elif what == 2:
            random.shuffle(stream)
        else:
            del stream[at:]
    return stream


def altered(random: Random, message: Message) -> bytes:
    """Return a protobuf message with one to three fields changed, wherever they are nested."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(random.choice((1, 1, 2, 3))):
        _alter(random, changed)
    return changed.SerializeToString()


def _alter(random: Random, message: Message) -> None:
    field: Any = random.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        _alter_repeated(random, getattr(message, field.name), field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if random.random() < 0.1:
            message.ClearField(field.name)
        elif field.message_type.fields:
            _alter(random, getattr(message, field.name))
    else:
        setattr(message, field.name, _value(random, field, getattr(message, field.name)))


def _alter_repeated(random: Random, values: Any, field: FieldDescriptor) -> None:
    what = random.randrange(4) if len(values) else 3
    if what == 0:
        del values[random.randrange(len(values))]
    elif what == 1:
        values.extend([random.choice(values)] * random.choice((1, 2, 300)))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _alter(random, random.choice(values) if what == 2 else values.add())
    elif what == 2:
        values[random.randrange(len(values))] = _value(random, field, values[0])
    else:
        values.append(_value(random, field, field.default_value))


def _value(random: Random, field: FieldDescriptor, now: object) -> object:
    if field.type == FieldDescriptor.TYPE_BYTES:
        assert isinstance(now, bytes)
        return damaged(random, now) if now else random.randbytes(random.randrange(40))
    if field.type == FieldDescriptor.TYPE_STRING:
        return damaged(random, str(now).encode()).decode(errors="replace")
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not now
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return random.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
    return random.choice(HUGE) & _most(field)


def _most(field: FieldDescriptor) -> int:
    if field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64):
        return UNSIGNED_64
    if field.type == FieldDescriptor.TYPE_UINT32:
        return (1 << 32) - 1
    return (1 << 31) - 1


def _flip(random: Random, message: bytes) -> bytes:
    if not message:
        return message
    changed = bytearray(message)
    for _ in range(random.choice((1, 1, 3, 16))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(random: Random, message: bytes) -> bytes:
    return message[: random.randrange(len(message) + 1)]


def _extend(random: Random, message: bytes) -> bytes:
    return message + random.randbytes(random.choice((1, 2, 16, 100)))


def _remove(random: Random, message: bytes) -> bytes:
    begin = random.randrange(len(message) + 1)
    return message[:begin] + message[begin + random.choice((1, 2, 8, 64)) :]


def _repeat(random: Random, message: bytes) -> bytes:
    begin = random.randrange(len(message) + 1)
    part = message[begin : begin + random.choice((1, 2, 8, 64))]
    times = min(random.choice((1, 2, 1000)), MAX_GROWTH_BYTES // max(1, len(part)))
    return message[:begin] + part * times + message[begin:]


def _huge_number(random: Random, message: bytes) -> bytes:
    """Put a varint of up to eleven bytes, or a large fixed number, over what is there."""
    at = random.randrange(len(message) + 1)
    number = random.choice(
        (
            b"\xff" * random.randrange(1, 11) + b"\x7f",
            b"\xff" * 8,
            b"\x80" * 10 + b"\x01",
            random.choice(HUGE).to_bytes(8, "little"),
        )
    )
    return message[:at] + number + message[at + random.choice((1, len(number))) :]


DAMAGES: tuple[Damage, ...] = (_flip, _flip, _cut, _extend, _remove, _repeat, _huge_number)
