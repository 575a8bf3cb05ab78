"""Hashing many blocks at once gives what hashing them one by one gives."""

from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.block_links import MAX_PACKED_TOKEN, link_blocks, link_each, link_many
from kvferry.proto.extra_keys import (
    LoraKey,
    MultimodalItem,
    PromptEmbeds,
    RequestKeys,
    block_extra_keys,
)
from kvferry.proto.hashing import HashChain, hash_block, hash_tokens, make_scheme
from kvferry.proto.scheme import Algorithm, HashScheme, KeyFormat
from kvferry.proto.tokens import MAX_TOKEN, pack_tokens

# Where the encoded form of a token changes: 1, 2, 3, 5 and 9 bytes.
BORDERS = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, MAX_TOKEN]
PACKED_BORDERS = [token for token in BORDERS if token <= MAX_PACKED_TOKEN]
CBOR_ALGORITHMS: list[Algorithm] = ["sha256_cbor", "xxhash_cbor"]


def requests_keys() -> st.SearchStrategy[RequestKeys]:
    texts = st.sampled_from(["a", "b", "a longer text than CBOR writes with one head byte"])
    images = st.lists(st.tuples(texts, st.integers(0, 9), st.integers(1, 9)), max_size=4)

    def made(salt: str | None, lora: str | None, images: list[Any], embeds: bool) -> RequestKeys:
        items, end = [], 0
        for identifier, gap, length in images:
            items.append(MultimodalItem(identifier=identifier, offset=end + gap, length=length))
            end += gap + length
        return RequestKeys(
            salt=salt,
            lora=LoraKey(name=lora, path=f"/{lora}") if lora else None,
            multimodal=tuple(items),
            prompt_embeds=PromptEmbeds(raw=bytes(40), bytes_per_token=4) if embeds else None,
        )

    return st.builds(made, st.none() | texts, st.none() | texts, images, st.booleans())


def one_by_one(scheme: HashScheme, tokens: list[int], keys: RequestKeys) -> list[bytes]:
    """Hash without `HashChain` in one pass, so that only single blocks are ever linked."""
    size, parent = scheme.hash_block_tokens, scheme.none_hash
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        extra = block_extra_keys(scheme.key_format, keys, start, start + size)
        parent = hash_block(scheme, parent, tokens[start : start + size], extra)
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@settings(deadline=None, max_examples=60)
@given(
    size=st.sampled_from([1, 2, 3, 16, 24, 300]),
    tail=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(0, 40),
    largest=st.sampled_from(BORDERS),
    keys=requests_keys(),
)
def test_a_prompt_hashes_alike_whatever_holds_it_and_however_many_blocks_are_linked_at_once(
    *,
    algorithm: Algorithm,
    key_format: KeyFormat,
    size: int,
    tail: int,
    seed: int,
    num_blocks: int,
    largest: int,
    keys: RequestKeys,
) -> None:
    scheme = make_scheme(hash_block_tokens=size, algorithm=algorithm, key_format=key_format)
    allowed = [token for token in BORDERS if token <= largest]
    array = np.random.default_rng(seed).choice(
        np.array(allowed, dtype=np.uint64), size=num_blocks * size + min(tail, size - 1)
    )
    tokens = array.tolist()
    expected = tuple(one_by_one(scheme, tokens, keys))
    assert hash_tokens(scheme, tokens, keys) == expected
    assert hash_tokens(scheme, tuple(tokens), keys) == expected
    assert hash_tokens(scheme, array, keys) == expected
    if largest < 2**32:
        assert hash_tokens(scheme, array.astype(np.uint32), keys) == expected
    if largest < 2**63:
        assert hash_tokens(scheme, array.astype(np.int64), keys) == expected


@pytest.mark.parametrize("algorithm", CBOR_ALGORITHMS)
@settings(deadline=None, max_examples=100)
@given(
    tokens=st.lists(st.sampled_from(PACKED_BORDERS) | st.integers(0, MAX_PACKED_TOKEN), min_size=1),
    size=st.integers(1, 5),
    extra=st.lists(st.none() | st.just(("salt",)) | st.just((("mm", "x", -3),)), min_size=100),
    root=st.binary(max_size=70),
)
def test_many_blocks_link_as_each_of_them_does(
    algorithm: Algorithm,
    tokens: list[int],
    size: int,
    extra: list[tuple[object, ...] | None],
    root: bytes,
) -> None:
    scheme = make_scheme(hash_block_tokens=size, algorithm=algorithm)
    packed = pack_tokens((tokens * size)[: len(tokens) // size * size or size])
    keys = extra[: len(packed) // size]
    each = link_each(scheme, root, packed, keys)
    assert link_many(scheme, root, packed, keys) == each
    assert link_blocks(scheme, root, packed, keys) == each


@pytest.mark.parametrize("key_format", get_args(KeyFormat))
@pytest.mark.parametrize("algorithm", CBOR_ALGORITHMS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 200), max_size=4),
    size=st.integers(1, 6),
)
def test_a_chain_grown_in_pieces_of_any_length_is_the_one_of_a_single_pass(
    *,
    algorithm: Algorithm,
    key_format: KeyFormat,
    seed: int,
    num_tokens: int,
    cuts: list[int],
    size: int,
) -> None:
    scheme = make_scheme(hash_block_tokens=size, algorithm=algorithm, key_format=key_format)
    keys = RequestKeys(salt="s")
    array = np.random.default_rng(seed).choice(np.array(PACKED_BORDERS), size=num_tokens)
    tokens = array.tolist()
    in_lists, in_arrays = HashChain(scheme, keys), HashChain(scheme, keys)
    borders = [0, *sorted(min(cut, num_tokens) for cut in cuts), num_tokens]
    for first, last in pairwise(borders):
        in_lists.extend(tokens[first:last])
        in_arrays.extend(array[first:last])
        assert in_lists.num_tokens == in_arrays.num_tokens == last
    assert list(in_lists.hashes) == one_by_one(scheme, tokens, keys)
    assert in_arrays.hashes == in_lists.hashes


def test_more_blocks_than_are_encoded_together_are_one_chain() -> None:
    scheme = make_scheme(hash_block_tokens=2)
    tokens = list(range(2 * 1000))
    assert list(hash_tokens(scheme, tokens)) == one_by_one(scheme, tokens, RequestKeys())
