import hashlib
import json
from dataclasses import replace
from typing import Any

import cbor2
import pytest

from kvferry.proto.errors import BadInputError, ConfigError, IdentityMismatchError
from kvferry.proto.identity import (
    GroupSpec,
    Identity,
    identity_from_cbor,
    identity_from_plain,
    identity_to_cbor,
    identity_to_plain,
    require_equal_identities,
)

IDENTITY = Identity(
    model="tiny",
    weight_version="sha256:00ff",
    weight_dtype="bfloat16",
    kv_dtype="bfloat16",
    kv_scales="",
    rope='{"theta":10000.0}',
    num_layers=2,
    num_kv_heads=2,
    head_size=64,
    groups=(GroupSpec(kind="full", layers=(0, 1)),),
)
CHANGES = [
    {"model": "other"},
    {"weight_version": "sha256:00fe"},
    {"weight_dtype": "float32"},
    {"kv_dtype": "float32"},
    {"kv_scales": "1.0"},
    {"rope": '{"theta":500000.0}'},
    {"num_kv_heads": 4},
    {"head_size": 128},
    {"groups": (GroupSpec(kind="full", layers=(0,)), GroupSpec(kind="full", layers=(1,)))},
]


def test_equal_identities_have_equal_digests_of_32_bytes() -> None:
    assert replace(IDENTITY).digest() == IDENTITY.digest()
    assert len(IDENTITY.digest()) == 32


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_difference_in_any_field_changes_the_digest_and_is_refused_by_name(
    change: dict[str, object],
) -> None:
    theirs = replace(IDENTITY, **change)  # type: ignore[arg-type]
    assert theirs.digest() != IDENTITY.digest()
    with pytest.raises(IdentityMismatchError, match="instance p-0") as caught:
        require_equal_identities(IDENTITY, theirs, who="instance p-0")
    assert list(caught.value.given) == list(caught.value.allowed) == list(change)


def test_a_mismatch_shows_both_values() -> None:
    with pytest.raises(IdentityMismatchError) as caught:
        require_equal_identities(IDENTITY, replace(IDENTITY, head_size=128), who="x")
    assert caught.value.given == {"head_size": 128}
    assert caught.value.allowed == {"head_size": 64}


def test_equal_identities_are_accepted() -> None:
    require_equal_identities(IDENTITY, replace(IDENTITY), who="x")


def test_the_plain_form_survives_json_and_becomes_the_same_identity() -> None:
    plain = json.loads(json.dumps(identity_to_plain(IDENTITY)))
    assert plain["groups"] == [{"kind": "full", "layers": [0, 1]}]
    assert identity_from_plain(plain) == IDENTITY
    assert identity_from_plain(plain).digest() == IDENTITY.digest()


def test_a_plain_form_with_a_missing_or_unknown_field_is_refused() -> None:
    plain = identity_to_plain(IDENTITY)
    for broken in (
        {key: value for key, value in plain.items() if key != "rope"},
        {key: value for key, value in plain.items() if key != "groups"},
        {**plain, "colour": "red"},
        {**plain, "groups": [{"kind": "full"}]},
    ):
        with pytest.raises(ConfigError, match="not an identity"):
            identity_from_plain(broken)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_a_size_that_is_no_positive_integer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer") as caught:
        replace(IDENTITY, **{name: value})  # type: ignore[arg-type]
    assert caught.value.given == value


@pytest.mark.parametrize("layers", [(0,), (0, 1, 1), (0, 2), (0, 1, 2), ()])
def test_groups_that_do_not_cover_every_layer_once_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="every layer exactly once") as caught:
        replace(IDENTITY, groups=(GroupSpec(kind="full", layers=layers),))
    assert caught.value.given == sorted(layers)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not CBOR"),
        (b"\xff\xff", "not CBOR"),
        (b"\x01", "not a map; given: int"),
        (cbor2.dumps([1, 2]), "not a map; given: list"),
        (cbor2.dumps({"model": "x"}), "not an identity"),
    ],
)
def test_bytes_that_are_no_identity_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        identity_from_cbor(data)


def test_equal_identities_have_equal_bytes() -> None:
    data = identity_to_cbor(IDENTITY)
    assert identity_to_cbor(identity_from_cbor(data)) == data


def test_the_digest_is_the_sha256_of_the_canonical_cbor() -> None:
    assert IDENTITY.digest() == hashlib.sha256(identity_to_cbor(IDENTITY)).digest()
    assert identity_from_cbor(identity_to_cbor(IDENTITY)) == IDENTITY


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": 5}, "model must be a text; given: 5; allowed: str"),
        ({"weight_dtype": b"float32"}, "weight_dtype must be a text; given: b'float32'"),
        ({"rope": None}, "rope must be a text; given: None; allowed: str"),
        ({"groups": [{"kind": 7, "layers": [0, 1]}]}, r"unknown kind; given: 7; allowed: \['full'"),
        ({"groups": [{"kind": "full", "layers": [0.0, 1]}]}, "layers .* integer; given: 0.0"),
        ({"groups": [{"kind": "full", "layers": [False, 1]}]}, "layers .* integer; given: False"),
        ({"groups": [{"kind": "full", "layers": ["0", 1]}]}, "layers .* integer; given: '0'"),
    ],
    ids=str,
)
def test_an_identity_from_the_wire_with_a_field_of_a_wrong_kind_is_refused_by_name(
    change: dict[str, object], said: str
) -> None:
    data = cbor2.dumps({**identity_to_plain(IDENTITY), **change})
    with pytest.raises(ConfigError, match=said):
        identity_from_cbor(data)


def test_a_block_takes_k_and_v_of_every_head_and_layer_in_the_kv_dtype() -> None:
    assert IDENTITY.block_bytes(16) == 2 * 2 * 16 * 2 * 64 * 2
    assert replace(IDENTITY, kv_dtype="float32").block_bytes(16) == 2 * IDENTITY.block_bytes(16)
    with pytest.raises(ConfigError, match="unknown kv_dtype; given: fp9"):
        replace(IDENTITY, kv_dtype="fp9").block_bytes(16)


def test_groups_of_every_kind_survive_cbor() -> None:
    groups = (
        GroupSpec(kind="full", layers=(0,)),
        GroupSpec(kind="sliding_window", layers=(1,), window_tokens=64),
        GroupSpec(kind="chunked_local", layers=(2,), chunk_tokens=128),
        GroupSpec(kind="mamba", layers=(3,), state_bytes=4096),
    )
    identity = replace(IDENTITY, num_layers=4, groups=groups)
    assert identity_from_cbor(identity_to_cbor(identity)) == identity


def test_a_wider_window_is_another_identity() -> None:
    narrow = GroupSpec(kind="sliding_window", layers=(0, 1), window_tokens=64)
    wide = replace(narrow, window_tokens=65)
    digests = {replace(IDENTITY, num_layers=2, groups=(g,)).digest() for g in (narrow, wide)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sliding_window", {}),
        ("sliding_window", {"window_tokens": 0}),
        ("sliding_window", {"window_tokens": 8, "chunk_tokens": 8}),
        ("full", {"window_tokens": 8}),
        ("mamba", {"state_bytes": True}),
    ],
)
def test_a_group_has_exactly_the_settings_of_its_kind(kind: Any, settings: Any) -> None:
    with pytest.raises(ConfigError):
        GroupSpec(kind=kind, layers=(0,), **settings)


def test_a_block_id_takes_the_bytes_of_the_largest_group() -> None:
    groups = (
        GroupSpec(kind="full", layers=(0,)),
        GroupSpec(kind="sliding_window", layers=(1, 2), window_tokens=64),
    )
    hybrid = replace(IDENTITY, num_layers=3, groups=groups)
    page_bytes = 2 * 16 * IDENTITY.num_kv_heads * IDENTITY.head_size * 2
    assert hybrid.block_bytes(16) == 2 * page_bytes


@pytest.mark.parametrize(
    ("kind", "setting", "first_needed"),
    [
        ("full", {}, [0, 0, 0, 0]),
        ("sliding_window", {"window_tokens": 1}, [0, 1, 2, 3]),
        ("sliding_window", {"window_tokens": 5}, [0, 1, 2, 3]),
        ("sliding_window", {"window_tokens": 6}, [0, 0, 1, 2]),
        ("sliding_window", {"window_tokens": 64}, [0, 0, 0, 0]),
        ("chunked_local", {"chunk_tokens": 8}, [0, 2, 2, 4]),
        ("chunked_local", {"chunk_tokens": 6}, [0, 1, 3, 3]),
        ("mamba", {"state_bytes": 1}, [0, 1, 2, 3]),
    ],
)
def test_a_group_needs_the_blocks_that_the_next_token_attends_to(
    kind: Any, setting: Any, first_needed: list[int]
) -> None:
    """Blocks of 4 tokens: with a window of 6, the token at 12 attends to tokens 7 to 12."""
    group = GroupSpec(kind=kind, layers=(0,), **setting)
    assert [group.first_needed_block(num_blocks, 4) for num_blocks in range(1, 5)] == first_needed
