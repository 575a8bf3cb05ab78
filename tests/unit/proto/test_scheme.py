from dataclasses import replace

import pytest

from kvferry.proto.errors import ConfigError, SchemeMismatchError
from kvferry.proto.scheme import Algorithm, HashScheme, require_equal_schemes

SCHEME = HashScheme(
    algorithm="sha256_cbor", key_format="0.32", hash_block_tokens=16, none_hash=b"\x01" * 32
)


def test_equal_schemes_are_accepted() -> None:
    require_equal_schemes(SCHEME, replace(SCHEME), who="instance decode-0")


def test_each_differing_field_is_shown_with_both_values_and_no_other() -> None:
    theirs = replace(SCHEME, algorithm="sha256", none_hash=b"\xff" * 32)
    with pytest.raises(SchemeMismatchError, match="instance decode-0") as caught:
        require_equal_schemes(SCHEME, theirs, who="instance decode-0")
    assert caught.value.given == {"algorithm": "sha256", "none_hash": "ff" * 32}
    assert caught.value.allowed == {"algorithm": "sha256_cbor", "none_hash": "01" * 32}


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "sha256"},
        {"key_format": "0.17"},
        {"hash_block_tokens": 32},
        {"none_hash": b"\x03" * 32},
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


@pytest.mark.parametrize(
    ("algorithm", "root_bytes"),
    [("sha256_cbor", 32), ("sha256", 32), ("xxhash_cbor", 16), ("xxhash", 16)],
)
def test_a_root_that_is_no_hash_of_the_algorithm_is_refused(
    algorithm: Algorithm, root_bytes: int
) -> None:
    assert replace(SCHEME, algorithm=algorithm, none_hash=bytes(root_bytes))
    for wrong in (b"", bytes(48 - root_bytes), bytes(root_bytes + 1), "0" * root_bytes):
        with pytest.raises(ConfigError, match=f"no hash of {algorithm}; .*: {root_bytes} bytes"):
            replace(SCHEME, algorithm=algorithm, none_hash=wrong)  # type: ignore[arg-type]
