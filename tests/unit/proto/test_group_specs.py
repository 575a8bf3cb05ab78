from dataclasses import replace
from typing import Any

import pytest
from tests.builders import make_identity

from kvferry.proto.errors import ConfigError
from kvferry.proto.group_specs import spec_of_group
from kvferry.proto.identity import GroupSpec
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    FullSpec,
    MambaSpec,
    SlidingWindowSpec,
)

IDENTITY = make_identity(
    kv_dtype="bfloat16",
    num_kv_heads=2,
    groups=(
        GroupSpec(kind="full", layers=(0,)),
        GroupSpec(kind="sliding_window", layers=(1,), window_tokens=6),
        GroupSpec(kind="chunked_local", layers=(2,), chunk_tokens=8),
        GroupSpec(kind="mamba", layers=(3,), state_bytes=1024),
    ),
)


def test_a_group_of_an_identity_has_the_spec_of_its_kind() -> None:
    attention: dict[str, Any] = {
        "block_tokens": 16,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    assert [spec_of_group(IDENTITY, group, 16) for group in IDENTITY.groups] == [
        FullSpec(**attention),
        SlidingWindowSpec(**attention, window_tokens=6),
        ChunkedLocalSpec(**attention, chunk_tokens=8),
        MambaSpec(block_tokens=16, shapes=((1024,),), dtypes=("uint8",), mode="all"),
    ]


def test_a_page_of_the_spec_has_the_bytes_of_a_block_of_one_layer() -> None:
    for group in IDENTITY.groups:
        assert spec_of_group(IDENTITY, group, 16).page_bytes == IDENTITY.block_bytes(16) == 1024


def test_a_dtype_of_unknown_size_is_refused() -> None:
    unknown = replace(IDENTITY, kv_dtype="fp8")
    with pytest.raises(ConfigError, match=r"unknown dtype; given: fp8; allowed: .*bfloat16"):
        spec_of_group(unknown, IDENTITY.groups[0], 16)
