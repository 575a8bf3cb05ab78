import hashlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError, ConfigError, TokenError
from kvferry.proto.extra_keys import LoraKey, MultimodalItem, RequestKeys
from kvferry.proto.hashing import (
    DEFAULT_SEED_032,
    HashChain,
    compute_none_hash,
    hash_block,
    hash_tokens,
    make_scheme,
    merged_view,
)
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import Algorithm, KeyFormat

SCHEME = make_scheme(hash_block_tokens=4)
TOKENS = st.lists(st.integers(0, 2**64 - 1), max_size=30)


def test_the_default_scheme_is_cbor_with_tagged_keys_and_seed_0() -> None:
    assert SCHEME.algorithm == "sha256_cbor"
    assert SCHEME.key_format == "0.32"
    assert SCHEME.none_hash.hex() == (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    )


# First 8 bytes measured on vLLM 0.17.1: tokens 0..39 in blocks of 16.
@pytest.mark.parametrize(
    ("seed", "algorithm", "root", "first", "second"),
    [
        ("0", "sha256", "1973e23848344dc4", "6358e31578a64b75", "3c3c50f324aefbdf"),
        ("0", "sha256_cbor", "4e1195df020de59e", "d830de3d42c00f25", "fedd9e4abebebbe6"),
        ("0", "xxhash", "6fb31cc38bba6066", "8ef953407c0da43e", "5a51cc5ac3a4b1f7"),
        ("0", "xxhash_cbor", "1ebe36576dcb573f", "209f5d549fc07c8e", "03888914ee75b87e"),
        ("42", "sha256", "c0bc02c9fc92a494", "63921f8159563637", "9419cbcf7b3751d0"),
        ("42", "xxhash_cbor", "a9d2e63407fce1a2", "6efc8ab550d01924", "dd4a1f893f4dc3bd"),
        (DEFAULT_SEED_032, "sha256", "066b1e8987e02713", "fe8fa5dda3210d0c", "8be7aaa33831156d"),
    ],
)
def test_known_answers_of_every_algorithm(
    seed: str, algorithm: Algorithm, root: str, first: str, second: str
) -> None:
    scheme = make_scheme(seed=seed, hash_block_tokens=16, algorithm=algorithm)
    hashes = hash_tokens(scheme, range(40))
    assert scheme.none_hash.hex()[:16] == root
    assert [block_hash.hex()[:16] for block_hash in hashes] == [first, second]


def test_known_answers_of_the_default_algorithm() -> None:
    assert compute_none_hash("sha256_cbor", "42").hex() == (
        "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780"
    )
    assert [block_hash.hex() for block_hash in hash_tokens(SCHEME, range(1, 9))] == [
        "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
        "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
    ]
    wide = hash_block(SCHEME, SCHEME.none_hash, (0, 65535, 65536, 2147483647), None)
    assert wide.hex() == "277deca7e4a9674fb8282c5c87863951a765db2f094f08d0dc3fe02c00c2ab62"


def test_a_block_is_hashed_as_the_canonical_cbor_of_parent_tokens_and_keys() -> None:
    scheme = make_scheme(hash_block_tokens=3)
    encoded = bytes.fromhex("8344aaaaaaaa83010219012c816473616c74")
    expected = hashlib.sha256(encoded).digest()
    assert hash_block(scheme, b"\xaa" * 4, (1, 2, 300), ("salt",)) == expected


@pytest.mark.parametrize("key_format", ["0.32", "0.17"])
@settings(deadline=None, max_examples=50)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 30), max_size=5), size=st.integers(1, 5))
def test_a_chain_does_not_depend_on_how_its_tokens_are_cut(
    key_format: KeyFormat, tokens: list[int], cuts: list[int], size: int
) -> None:
    scheme = make_scheme(hash_block_tokens=size, key_format=key_format)
    keys = RequestKeys(lora=LoraKey(name="a", path="/a"), salt="s")
    chain = HashChain(scheme, keys)
    returned: tuple[BlockHash, ...] = ()
    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for first, last in pairwise(borders):
        returned += chain.extend(tokens[first:last])
        assert chain.num_tokens == last
        assert len(chain.hashes) == last // size
    assert returned == chain.hashes == hash_tokens(scheme, tokens, keys)


@settings(deadline=None, max_examples=50)
@given(TOKENS, TOKENS)
def test_chains_agree_exactly_as_long_as_their_tokens_do(a: list[int], b: list[int]) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    common = min(len(a), len(b)) if common is None else common
    for i, (x, y) in enumerate(
        zip(hash_tokens(SCHEME, a), hash_tokens(SCHEME, b), strict=False), start=1
    ):
        assert (x == y) == (i * 4 <= common)


def test_only_full_blocks_are_hashed_and_only_new_hashes_returned() -> None:
    chain = HashChain(SCHEME)
    assert chain.extend([1, 2, 3]) == ()
    first = chain.extend([4])
    second = chain.extend([5, 6, 7, 8, 9])
    assert (len(first), len(second)) == (1, 1)
    assert chain.hashes == first + second
    assert chain.num_tokens == 9


def test_every_block_is_the_child_of_the_one_before() -> None:
    first, second = hash_tokens(SCHEME, range(8))
    assert first == hash_block(SCHEME, SCHEME.none_hash, range(4), None)
    assert second == hash_block(SCHEME, first, range(4, 8), None)


def test_a_refused_token_leaves_the_chain_as_it_was() -> None:
    chain = HashChain(SCHEME, who="request r-1")
    chain.extend([1, 2, 3])
    with pytest.raises(TokenError, match="request r-1"):
        chain.extend([4, True])
    assert chain.num_tokens == 3
    assert chain.extend([4]) == hash_tokens(SCHEME, [1, 2, 3, 4])


@pytest.mark.parametrize("length", [0, 3, 5])
def test_a_block_that_is_not_full_is_refused_with_both_lengths(length: int) -> None:
    with pytest.raises(BadInputError) as caught:
        hash_block(SCHEME, SCHEME.none_hash, range(length), None)
    assert caught.value.given == f"{length} tokens"
    assert caught.value.allowed == "4 tokens"


@pytest.mark.parametrize("parent", [None, 32, "ab", [1, 2], b"", bytearray()])
def test_a_parent_that_is_not_bytes_is_refused(parent: object) -> None:
    with pytest.raises(BadInputError, match="parent hash must be bytes"):
        hash_block(SCHEME, parent, range(4), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extra_keys", [["salt"], "salt", {}, (None,), ((),), ((1, "a"),), (("mm", ["a"]),)], ids=repr
)
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256"])
def test_extra_keys_of_another_form_are_refused(algorithm: Algorithm, extra_keys: Any) -> None:
    scheme = make_scheme(hash_block_tokens=4, algorithm=algorithm)
    with pytest.raises(BadInputError, match="these are no extra keys"):
        hash_block(scheme, scheme.none_hash, range(4), extra_keys)


@pytest.mark.parametrize("keys", [None, {"salt": "s"}])
def test_keys_of_a_wrong_kind_are_refused_even_for_no_block(keys: Any) -> None:
    with pytest.raises(BadInputError, match="keys of a request must be a RequestKeys") as caught:
        hash_tokens(SCHEME, [1], keys)
    assert caught.value.given == repr(keys)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"algorithm": ["sha256"]}, r"unknown hash algorithm; given: \['sha256'\]; allowed"),
        ({"algorithm": None}, "unknown hash algorithm; given: None; allowed"),
        ({"key_format": None}, r"unknown key format; given: None; allowed: \['0.32', '0.17'\]"),
        ({"key_format": ["0.32"]}, r"unknown key format; given: \['0.32'\]"),
        ({"hash_block_tokens": 2**31 + 1}, "given: 2147483649; allowed: 1 to 2147483648"),
        ({"hash_block_tokens": 0}, "given: 0; allowed: 1 to 2147483648"),
        ({"hash_block_tokens": None}, "given: None; allowed: 1 to 2147483648"),
        ({"hash_block_tokens": True}, "given: True; allowed: 1 to 2147483648"),
    ],
)
def test_a_scheme_of_wrong_values_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheme(**{"hash_block_tokens": 4, **wrong})


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "sha256_cbor", "xxhash_cbor"])
def test_a_seed_with_a_lone_surrogate_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(ConfigError, match=r"the hash seed must be a text; given: '\\udc80' \(str"):
        compute_none_hash(algorithm, "\udc80")


@pytest.mark.parametrize("seed", [0, None, b"0"])
def test_a_seed_that_is_no_text_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="the hash seed must be a text"):
        make_scheme(seed=seed, hash_block_tokens=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "sha256_cbor", "xxhash_cbor"])
@pytest.mark.parametrize("key_format", ["0.32", "0.17"])
def test_equal_texts_hash_alike_whether_they_are_one_object_or_two(
    algorithm: Algorithm, key_format: KeyFormat
) -> None:
    scheme = make_scheme(hash_block_tokens=4, algorithm=algorithm, key_format=key_format)
    one, two = "img-a", "".join(["img", "-a"])
    assert one is not two
    hashes = {
        hash_tokens(
            scheme,
            range(4),
            RequestKeys(
                salt=salt,
                multimodal=(
                    MultimodalItem(identifier=first, offset=0, length=1),
                    MultimodalItem(identifier=second, offset=2, length=1),
                ),
            ),
        )
        for first, second, salt in [(one, one, one), (one, two, one), (two, one, one)]
    }
    assert len(hashes) == 1


def test_the_flat_format_depends_on_where_the_prompt_ended_and_the_tagged_one_does_not() -> None:
    keys = RequestKeys(multimodal=(MultimodalItem(identifier="a", offset=1, length=3),))

    def grown(key_format: KeyFormat) -> tuple[bool, bool]:
        scheme = make_scheme(hash_block_tokens=4, key_format=key_format)
        chain = HashChain(scheme, keys)
        chain.extend(range(4))
        chain.extend(range(4, 8))
        first, second = hash_tokens(scheme, range(8), keys)
        return chain.hashes[0] == first, chain.hashes[1] == second

    assert grown("0.32") == (True, True)
    assert grown("0.17") == (True, False)


HASHES = tuple(BlockHash(bytes([i]) * 2) for i in range(5))


def test_the_view_of_larger_blocks_takes_the_last_hash_of_each_whole_run() -> None:
    assert merged_view(HASHES, ratio=2, key_format="0.32") == (HASHES[1], HASHES[3])
    assert merged_view(HASHES, ratio=1, key_format="0.32") == HASHES
    assert merged_view(HASHES, ratio=6, key_format="0.32") == ()


def test_the_flat_view_of_larger_blocks_joins_the_hashes_of_each_whole_run() -> None:
    assert merged_view(HASHES, ratio=2, key_format="0.17") == (
        b"\x00\x00\x01\x01",
        b"\x02\x02\x03\x03",
    )
    assert merged_view(HASHES, ratio=1, key_format="0.17") == HASHES
    assert merged_view(HASHES, ratio=6, key_format="0.17") == ()


@pytest.mark.parametrize("ratio", [0, -1, True, 1.0])
def test_a_bad_ratio_is_refused(ratio: int) -> None:
    with pytest.raises(BadInputError, match="ratio must be a positive integer"):
        merged_view(HASHES, ratio=ratio, key_format="0.32")


@pytest.mark.parametrize("key_format", ["0.18", None, ["0.32"]])
def test_a_view_in_an_unknown_format_is_refused(key_format: Any) -> None:
    with pytest.raises(ConfigError, match="unknown key format") as caught:
        merged_view(HASHES, ratio=2, key_format=key_format)
    assert caught.value.given == repr(key_format)


@pytest.mark.parametrize("hashes", [None, 5, ["a"], iter(HASHES)])
def test_a_view_of_what_are_no_hashes_is_refused(hashes: Any) -> None:
    with pytest.raises(BadInputError, match="the hashes to merge must be bytes"):
        merged_view(hashes, ratio=2, key_format="0.32")
