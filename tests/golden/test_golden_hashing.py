"""Every recorded hashing vector of vLLM 0.17.1 and 0.32.0, bit for bit (see FORMAT.md, section 2).

The folder is taken from KVFERRY_GOLDEN when set.
"""

import json
from typing import Any

import pytest
from tests.golden.folder import lines_of

from kvferry.proto.digest import digest
from kvferry.proto.extra_keys import (
    LoraKey,
    MultimodalItem,
    PromptEmbeds,
    RequestKeys,
    block_extra_keys,
)
from kvferry.proto.hashing import (
    DEFAULT_SEED_032,
    HashChain,
    compute_none_hash,
    hash_tokens,
    make_scheme,
    merged_view,
)
from kvferry.proto.ids import BlockHash, GroupId, pack_group
from kvferry.proto.scheme import HashScheme


def vectors(kind: str) -> list[Any]:
    found = []
    for name in ("hashing_017.jsonl", "hashing_032.jsonl"):
        for number, line in enumerate(lines_of(name), start=1):
            vector = json.loads(line)
            if vector["type"] == kind:
                found.append(pytest.param(vector, id=f"{name}:{number}"))
    return found


def seed_of(vector: dict[str, Any]) -> str:
    return DEFAULT_SEED_032 if vector["seed"] is None else str(vector["seed"])


def scheme_of(vector: dict[str, Any]) -> HashScheme:
    return make_scheme(
        seed=seed_of(vector),
        hash_block_tokens=vector["hash_block_tokens"],
        algorithm=vector["algorithm"],
        key_format=vector["profile"],
    )


def keys_of(vector: dict[str, Any]) -> RequestKeys:
    lora, embeds = vector.get("lora"), vector.get("embeds")
    return RequestKeys(
        lora=LoraKey(name=lora["name"], path=lora["path"]) if lora else None,
        salt=vector.get("salt"),
        multimodal=tuple(
            MultimodalItem(identifier=identifier, offset=offset, length=length)
            for identifier, offset, length in vector.get("mm", [])
        ),
        prompt_embeds=PromptEmbeds(
            raw=bytes.fromhex(embeds["hex"]), bytes_per_token=embeds["bytes_per_token"]
        )
        if embeds
        else None,
    )


def needs_shared_objects(vector: dict[str, Any]) -> bool:
    return vector.get("identity") == "shared" and not vector["algorithm"].endswith("_cbor")


def chain_with_shared_objects(vector: dict[str, Any]) -> list[str]:
    """Hash as an engine does whose equal texts are one object; kvferry itself never does."""
    scheme, keys, size = scheme_of(vector), keys_of(vector), vector["hash_block_tokens"]
    objects: dict[object, object] = {}

    def shared(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(shared(item) for item in value)
        return objects.setdefault(value, value) if isinstance(value, str) else value

    hashes: list[str] = []
    parent = scheme.none_hash
    for start in range(0, len(vector["tokens"]) - size + 1, size):
        extra_keys = shared(block_extra_keys(scheme.key_format, keys, start, start + size))
        block = (parent, tuple(vector["tokens"][start : start + size]), extra_keys or None)
        parent = digest(scheme.algorithm, block)
        hashes.append(parent.hex())
    return hashes


def low64(hash_hex: str) -> str:
    return str(int.from_bytes(bytes.fromhex(hash_hex)[-8:], "big"))


@pytest.mark.parametrize("vector", vectors("root"))
def test_the_root_is_the_one_vllm_makes_from_the_seed(vector: dict[str, Any]) -> None:
    assert compute_none_hash(vector["algorithm"], seed_of(vector)).hex() == vector["expect"]["root"]


@pytest.mark.parametrize("vector", vectors("chain"))
def test_the_chain_is_the_one_vllm_makes(vector: dict[str, Any]) -> None:
    expect, prompt_len = vector["expect"], vector["prompt_len"]
    assert scheme_of(vector).none_hash.hex() == expect["root"]
    if needs_shared_objects(vector):
        assert prompt_len == len(vector["tokens"])
        hashes = chain_with_shared_objects(vector)
    else:
        chain = HashChain(scheme_of(vector), keys_of(vector))
        returned = list(chain.extend(vector["tokens"][:prompt_len]))
        for token in vector["tokens"][prompt_len:]:
            returned += chain.extend([token])
        assert returned == list(chain.hashes)
        hashes = [block_hash.hex() for block_hash in returned]
    assert hashes == expect["hashes"]
    assert [low64(hash_hex) for hash_hex in hashes] == expect["low64"]


@pytest.mark.parametrize("vector", vectors("merged"))
def test_the_view_at_larger_blocks_is_the_one_vllm_makes(vector: dict[str, Any]) -> None:
    expect, ratio = vector["expect"], vector["block_tokens"] // vector["hash_block_tokens"]
    hashes = hash_tokens(scheme_of(vector), vector["tokens"], keys_of(vector))
    merged = merged_view(hashes, ratio=ratio, key_format=vector["profile"])
    assert [block_hash.hex() for block_hash in hashes] == expect["hashes"]
    assert [block_hash.hex() for block_hash in merged] == expect["merged"]
    key = pack_group(BlockHash(merged[0]), GroupId(258))
    assert key.hex() == expect["key_of_first_in_group_258"]
