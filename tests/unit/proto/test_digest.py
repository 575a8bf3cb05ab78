import hashlib
import pickle

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.digest import depends_on_identity, digest, with_own_objects
from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.scheme import Algorithm

CBOR_BYTES = bytes.fromhex("8344aaaaaaaa83010219012c816473616c74")
VALUE = (b"\xaa" * 4, (1, 2, 300), ("salt",))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


def another(text: str) -> str:
    return "".join(text[i] for i in range(len(text)))


def test_cbor_algorithms_digest_the_canonical_encoding() -> None:
    assert digest("sha256_cbor", VALUE) == hashlib.sha256(CBOR_BYTES).digest()
    assert digest("xxhash_cbor", VALUE) == xxhash.xxh3_128_digest(CBOR_BYTES)


def test_pickle_algorithms_digest_protocol_5() -> None:
    pickled = pickle.dumps(VALUE, protocol=5)
    assert digest("sha256", VALUE) == hashlib.sha256(pickled).digest()
    assert digest("xxhash", VALUE) == xxhash.xxh3_128_digest(pickled)


@pytest.mark.parametrize("algorithm", ["md5", None, ["sha256"]])
def test_an_unknown_algorithm_is_refused_with_the_known_ones(algorithm: object) -> None:
    with pytest.raises(ConfigError, match="unknown hash algorithm") as caught:
        digest(algorithm, VALUE)  # type: ignore[arg-type]
    assert caught.value.given == repr(algorithm)
    assert caught.value.allowed == ["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"]


@pytest.mark.parametrize("value", [object(), "\ud800"], ids=["object", "lone surrogate"])
def test_what_cbor_cannot_write_is_refused(value: object) -> None:
    with pytest.raises(BadInputError, match="a value that cannot be hashed"):
        digest("sha256_cbor", (b"parent", value))


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_pickle_tells_one_object_from_two_equal_ones(algorithm: Algorithm) -> None:
    one = "img-a"
    assert depends_on_identity(algorithm)
    assert digest(algorithm, (one, one)) != digest(algorithm, (one, another(one)))


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash_cbor"])
def test_cbor_does_not_tell_one_object_from_two_equal_ones(algorithm: Algorithm) -> None:
    one = "img-a"
    assert not depends_on_identity(algorithm)
    assert digest(algorithm, (one, one)) == digest(algorithm, (one, another(one)))


@settings(deadline=None, max_examples=100)
@given(TEXTS, TEXTS)
def test_own_objects_are_equal_keys_with_one_pickle_whatever_was_shared(a: str, b: str) -> None:
    mm = "mm"
    shared = (a, a, ("mm", a, -3), ("mm", b, 1), b, b"12", a.encode())
    apart = (
        another(a),
        another(a),
        (another(mm), another(a), -3),
        (another(mm), another(b), 1),
        another(b),
        bytes(bytearray(b"12")),
        another(a).encode(),
    )
    assert with_own_objects(shared) == shared
    assert digest("sha256", with_own_objects(shared)) == digest("sha256", with_own_objects(apart))


def test_own_objects_share_the_tag_word_and_nothing_else() -> None:
    text, content = "mm", b"\x01" * 32
    first, second, third, fourth = with_own_objects((("mm", text), ("mm", text), text, content))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert first[0] is second[0]
    assert len({id(first[0]), id(first[1]), id(second[1]), id(third)}) == 4
    assert fourth is not content
