"""Bytes that may come from anywhere become a command, or one clear error."""

from dataclasses import replace
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.proto.test_packed_messages import STEP

from kvferry.proto.errors import BadInputError
from kvferry.proto.message_types import digest_of_types, require_declared_types
from kvferry.proto.messages import Registered, Reserved, Tick
from kvferry.proto.packed_messages import SCHEMA, pack_command, unpack_command
from kvferry.proto.step_messages import AdmitAsk, Step


def test_a_whole_command_comes_back_as_it_was() -> None:
    assert unpack_command(pack_command(STEP)) == STEP


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("call_id", b"c"),
        ("epoch", True),
        ("epoch", 1.0),
        ("token_budget", None),
        ("running", ("s",)),
        ("waiting", (replace(STEP.waiting[0], hashes=cast("Any", (b"h", "h"))),)),
        ("waiting", (replace(STEP.waiting[0], resumed=cast("Any", 0)),)),
        ("progress", (replace(STEP.progress[0], new_tokens=cast("Any", (1, 2.0))),)),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=f"{field} of a Step is of a wrong kind"):
        require_declared_types(replace(STEP, **{field: value}))


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with pytest.raises(BadInputError):
        unpack_command(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_gives_another_command_or_a_refusal(position: int, byte: int) -> None:
    packed = bytearray(pack_command(STEP))
    packed[position % len(packed)] = byte
    try:
        command = unpack_command(bytes(packed))
    except BadInputError:
        return
    require_declared_types(command)


def test_a_row_of_another_length_or_a_number_beyond_the_commands_is_refused() -> None:
    number, row = msgpack.unpackb(pack_command(STEP))
    for bad in ((number, row[:-1]), (number, [*row, 1]), (99, row), (number, None), (-1, row)):
        with pytest.raises(BadInputError):
            unpack_command(msgpack.packb(bad))


def test_the_schema_changes_with_any_field_of_any_message_within() -> None:
    assert len(SCHEMA) == 16
    digests = {digest_of_types(kinds) for kinds in ((Step,), (AdmitAsk,), (Tick,), (Reserved,))}
    assert len(digests) == 4
    assert digest_of_types((Registered,)) == digest_of_types((Registered,))
