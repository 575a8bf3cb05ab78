from dataclasses import replace

import pytest

from kvferry.proto.errors import ConfigError, SchemeMismatchError
from kvferry.proto.scheme import HashScheme, require_equal_schemes

SCHEME = HashScheme(
    algorithm="sha256_cbor", key_format="0.32", hash_block_tokens=16, none_hash=b"\x01\x02"
)


def test_equal_schemes_are_accepted() -> None:
    require_equal_schemes(SCHEME, replace(SCHEME), who="instance decode-0")


def test_each_differing_field_is_shown_with_both_values_and_no_other() -> None:
    theirs = replace(SCHEME, algorithm="sha256", none_hash=b"\xff")
    with pytest.raises(SchemeMismatchError, match="instance decode-0") as caught:
        require_equal_schemes(SCHEME, theirs, who="instance decode-0")
    assert caught.value.given == {"algorithm": "sha256", "none_hash": "ff"}
    assert caught.value.allowed == {"algorithm": "sha256_cbor", "none_hash": "0102"}


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "xxhash"},
        {"key_format": "0.17"},
        {"hash_block_tokens": 32},
        {"none_hash": b"\x01\x03"},
    ],
    ids=str,
)
def test_a_difference_in_any_field_is_refused(change: dict[str, object]) -> None:
    theirs = replace(SCHEME, **change)  # type: ignore[arg-type]
    with pytest.raises(SchemeMismatchError) as caught:
        require_equal_schemes(SCHEME, theirs, who="x")
    assert list(caught.value.given) == list(change)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"algorithm": "builtin"}, ["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"]),
        ({"key_format": "0.20"}, ["0.32", "0.17"]),
        ({"hash_block_tokens": 0}, "1 to 2147483648"),
        ({"hash_block_tokens": 2**31 + 1}, "1 to 2147483648"),
        ({"hash_block_tokens": True}, "1 to 2147483648"),
        ({"hash_block_tokens": 16.0}, "1 to 2147483648"),
    ],
    ids=str,
)
def test_a_scheme_that_cannot_be_is_refused_with_what_can(
    change: dict[str, object], allowed: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SCHEME, **change)  # type: ignore[arg-type]
    (wrong,) = change.values()
    assert caught.value.given == str(wrong)
    assert caught.value.allowed == allowed
