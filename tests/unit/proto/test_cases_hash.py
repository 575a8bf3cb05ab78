"""Public bug reports about hashing, each as a test of its own (the case id is in the name)."""

import hashlib
import json
import os
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest

from kvferry.proto.errors import SchemeMismatchError, TokenError
from kvferry.proto.extra_keys import LoraKey, MultimodalItem, PromptEmbeds, RequestKeys
from kvferry.proto.hashing import HashChain, hash_block, hash_tokens, make_scheme
from kvferry.proto.scheme import Algorithm, HashScheme, KeyFormat, require_equal_schemes

SCHEME = make_scheme(hash_block_tokens=4)
ROOT_SEED_0 = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
ROOT_SEED_42 = "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780"

PROCESS = """
import json, os
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.hashing import hash_tokens, make_scheme
answer = {}
for algorithm in ("sha256_cbor", "sha256", "xxhash_cbor", "xxhash"):
    seed = {"seed": os.environ["PYTHONHASHSEED"]} if "PYTHONHASHSEED" in os.environ else {}
    scheme = make_scheme(hash_block_tokens=4, algorithm=algorithm, **seed)
    requests = (RequestKeys(), RequestKeys(salt="s"))
    chains = [hash_tokens(scheme, range(1, 9), keys) for keys in requests]
    answer[algorithm] = {
        "none_hash": scheme.none_hash.hex(),
        "hashes": [[block_hash.hex() for block_hash in chain] for chain in chains],
    }
print(json.dumps(answer))
"""


def in_a_fresh_process(seed: str | None) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONHASHSEED", None)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def scheme_of(answer: dict[str, Any]) -> HashScheme:
    return HashScheme(
        algorithm="sha256_cbor",
        key_format="0.32",
        hash_block_tokens=4,
        none_hash=bytes.fromhex(answer["sha256_cbor"]["none_hash"]),
    )


def assert_differ_from_block(first: int, one: object, other: object) -> None:
    """Both are chains; equal before block `first`, different from there on."""
    assert isinstance(one, tuple)
    assert isinstance(other, tuple)
    assert [a == b for a, b in zip(one, other, strict=True)] == [i < first for i in range(len(one))]


@pytest.mark.parametrize("seed", ["0", None], ids=["same seed", "seed unset"])
def test_b01_two_processes_hash_alike_with_the_same_seed_or_none(seed: str | None) -> None:
    first, second = in_a_fresh_process(seed), in_a_fresh_process(seed)
    assert first == second
    assert first["sha256_cbor"]["none_hash"] == ROOT_SEED_0
    require_equal_schemes(scheme_of(first), scheme_of(second), who="the second process")


def test_b01_two_processes_with_different_seeds_are_told_apart_by_their_roots() -> None:
    first, second = in_a_fresh_process("0"), in_a_fresh_process("42")
    assert first["sha256_cbor"]["hashes"] != second["sha256_cbor"]["hashes"]
    with pytest.raises(SchemeMismatchError, match="the second process") as caught:
        require_equal_schemes(scheme_of(first), scheme_of(second), who="the second process")
    assert caught.value.given == {"none_hash": ROOT_SEED_42}
    assert caught.value.allowed == {"none_hash": ROOT_SEED_0}


def test_b02_every_algorithm_gives_one_digest_in_five_fresh_processes() -> None:
    answers = [in_a_fresh_process("0") for _ in range(5)]
    for algorithm in get_args(Algorithm):
        digests = {json.dumps(answer[algorithm]) for answer in answers}
        assert len(digests) == 1, algorithm


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
def test_b03_adapters_hash_by_name_whatever_the_order_of_loading(key_format: KeyFormat) -> None:
    scheme = make_scheme(hash_block_tokens=4, key_format=key_format)

    def load(names: str) -> dict[str, LoraKey]:
        return {name: LoraKey(name=name, path=f"/adapters/{name}") for name in names}

    first, second = load("ab"), load("ba")
    under_a = hash_tokens(scheme, range(1, 9), RequestKeys(lora=first["a"]))
    assert under_a == hash_tokens(scheme, range(1, 9), RequestKeys(lora=second["a"]))
    under_b = hash_tokens(scheme, range(1, 9), RequestKeys(lora=second["b"]))
    assert_differ_from_block(0, under_a, under_b)
    assert_differ_from_block(0, under_a, hash_tokens(scheme, range(1, 9)))


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_b04_every_integer_form_of_the_same_tokens_has_the_same_hash(algorithm: Algorithm) -> None:
    import torch

    scheme = make_scheme(hash_block_tokens=4, algorithm=algorithm)
    forms: list[object] = [
        [1, 2, 3, 4],
        (1, 2, 3, 4),
        [np.int64(i) for i in range(1, 5)],
        np.arange(1, 5, dtype=np.int32),
        torch.arange(1, 5, dtype=torch.int64),
        list(torch.arange(1, 5)),
        range(1, 5),
    ]
    assert len({hash_tokens(scheme, tokens) for tokens in forms}) == 1
    assert len({hash_block(scheme, scheme.none_hash, tokens, None) for tokens in forms}) == 1


@pytest.mark.parametrize("culprit", [True, 1.0])
def test_b04_bool_and_float_tokens_are_refused_naming_the_request(culprit: object) -> None:
    with pytest.raises(TokenError, match="request r-7") as caught:
        hash_tokens(SCHEME, [culprit, 2, 3, 4], who="request r-7")
    assert caught.value.given == {
        "position": 0,
        "value": f"{culprit!r} ({type(culprit).__name__})",
    }


def test_b04_tensors_of_bool_or_float_are_refused() -> None:
    import torch

    for tokens in (torch.tensor([True, False]), torch.tensor([1.0, 2.0])):
        with pytest.raises(TokenError, match="request r-7"):
            hash_tokens(SCHEME, tokens, who="request r-7")


@pytest.mark.parametrize("extra", [None, ("a",)], ids=["no extras", "extras"])
def test_b06_the_chain_is_the_same_whatever_holds_the_parents_bytes(
    extra: tuple[str, ...] | None,
) -> None:
    parent: bytes = SCHEME.none_hash
    for first in (1, 5, 9):
        tokens = tuple(range(first, first + 4))
        message = b"head" + parent + b"tail"
        forms = (parent, bytearray(parent), memoryview(message)[4:-4])
        # Written out by hand, so that no release of the CBOR encoder can move it.
        encoded = b"\x83\x58\x20" + parent + b"\x84" + bytes(tokens)
        encoded += b"\xf6" if extra is None else b"\x81\x61a"
        parent = hashlib.sha256(encoded).digest()
        assert [hash_block(SCHEME, form, tokens, extra) for form in forms] == [parent] * 3


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_b06_no_algorithm_minds_what_holds_the_parents_bytes(algorithm: Algorithm) -> None:
    scheme = make_scheme(hash_block_tokens=4, algorithm=algorithm)
    root = scheme.none_hash
    forms = (root, bytearray(root), memoryview(root))
    assert len({hash_block(scheme, parent, range(4), None) for parent in forms}) == 1


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_b08_an_adapter_replaced_under_its_name_finds_none_of_the_old_blocks(
    key_format: KeyFormat, algorithm: Algorithm
) -> None:
    scheme = make_scheme(hash_block_tokens=4, key_format=key_format, algorithm=algorithm)

    def under(version: str) -> tuple[bytes, ...]:
        lora = LoraKey(name="x", path="/adapters/x", version=version)
        return hash_tokens(scheme, range(1, 10), RequestKeys(lora=lora))

    assert under("v1") == under("v1")
    assert_differ_from_block(0, under("v1"), under("v2"))
    assert_differ_from_block(0, under("v1"), under(""))


def images(*items: tuple[str, int, int]) -> RequestKeys:
    return RequestKeys(
        multimodal=tuple(
            MultimodalItem(identifier=identifier, offset=offset, length=length)
            for identifier, offset, length in items
        )
    )


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
def test_b09_media_identifiers_count_in_full(key_format: KeyFormat) -> None:
    scheme = make_scheme(hash_block_tokens=4, key_format=key_format)
    one = hash_tokens(scheme, [0] * 12, images(("f00d0000abcd", 4, 4)))
    other = hash_tokens(scheme, [0] * 12, images(("f00d1111abcd", 4, 4)))
    assert_differ_from_block(1, one, other)
    minus_one = hash_tokens(scheme, [0] * 12, images(("-1", 4, 4)))
    minus_two = hash_tokens(scheme, [0] * 12, images(("-2", 4, 4)))
    assert_differ_from_block(1, minus_one, minus_two)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([65, 0], [321, 0]),
        ([100, 200], [131, 199]),
        ([2**16, 0], [0, 0]),
        ([2**32, 0], [0, 0]),
        ([2**64 - 1, 0], [2**31 - 1, 0]),
    ],
)
@pytest.mark.parametrize("position", [0, 2, 4, 6, 8, 10])
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_b09_tokens_count_in_full_and_by_position(
    algorithm: Algorithm, position: int, one: list[int], other: list[int]
) -> None:
    scheme = make_scheme(hash_block_tokens=4, algorithm=algorithm)
    around = [7] * position, [7] * (10 - position)
    assert_differ_from_block(
        position // 4,
        hash_tokens(scheme, around[0] + one + around[1]),
        hash_tokens(scheme, around[0] + other + around[1]),
    )


@pytest.mark.parametrize("placeholder", [-1, -2])
def test_b09_negative_placeholder_tokens_are_refused_and_never_wrapped(placeholder: int) -> None:
    with pytest.raises(TokenError) as caught:
        hash_tokens(SCHEME, [placeholder, 2, 3, 4])
    assert caught.value.given == {"position": 0, "value": placeholder}


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
def test_b09_embeddings_of_another_shape_with_equal_bytes_differ(key_format: KeyFormat) -> None:
    scheme = make_scheme(hash_block_tokens=4, key_format=key_format)
    raw = bytes(range(24))

    def shaped(num_tokens: int, bytes_per_token: int) -> tuple[bytes, ...]:
        embeds = PromptEmbeds(raw=raw, bytes_per_token=bytes_per_token)
        assert len(raw) == num_tokens * bytes_per_token
        return hash_tokens(scheme, [0] * 8, RequestKeys(prompt_embeds=embeds))

    assert_differ_from_block(0, shaped(6, 4), shaped(4, 6))


def test_b09_where_one_image_ends_and_the_next_begins_counts() -> None:
    five_three = hash_tokens(SCHEME, [0] * 12, images(("A", 0, 5), ("B", 5, 3)))
    three_five = hash_tokens(SCHEME, [0] * 12, images(("A", 0, 3), ("B", 3, 5)))
    assert_differ_from_block(0, five_three, three_five)


def test_b09_every_image_of_the_last_prompt_block_counts_once_it_is_full() -> None:
    chains = []
    for first_image in ("A", "C"):
        chain = HashChain(SCHEME, images((first_image, 4, 1), ("B", 5, 1)))
        chain.extend([0] * 6)
        chain.extend([0] * 6)
        chains.append(chain.hashes)
    assert_differ_from_block(1, *chains)


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
def test_b10_another_tenants_salt_finds_nothing_and_the_own_one_everything(
    key_format: KeyFormat,
) -> None:
    scheme = make_scheme(hash_block_tokens=4, key_format=key_format)

    def tenant(salt: str | None) -> tuple[bytes, ...]:
        return hash_tokens(scheme, range(1, 10), RequestKeys(salt=salt))

    assert tenant("s1") == tenant("s1")
    assert_differ_from_block(0, tenant("s1"), tenant("s2"))
    assert_differ_from_block(0, tenant("s1"), tenant(None))


def test_b10_a_salt_is_not_taken_for_an_adapter_of_the_same_name() -> None:
    salted = hash_tokens(SCHEME, range(1, 10), RequestKeys(salt="x"))
    adapted = hash_tokens(SCHEME, range(1, 10), RequestKeys(lora=LoraKey(name="x", path="x")))
    assert_differ_from_block(0, salted, adapted)
