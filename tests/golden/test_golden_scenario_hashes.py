"""The hashes that the recorded scenarios of vLLM 0.17.1 and 0.32.0 expect (FORMAT.md, section 1.2).

Only those: what the scenarios say about blocks is no matter of the hash chain.
"""

import json
from typing import Any

import pytest
from tests.golden.folder import lines_of

from kvferry.proto.extra_keys import LoraKey, MultimodalItem, RequestKeys
from kvferry.proto.hashing import DEFAULT_SEED_032, HashChain, make_scheme


def scenarios() -> list[Any]:
    found = []
    for name in ("scenarios_017.jsonl", "scenarios_032.jsonl"):
        for number, line in enumerate(lines_of(name), start=1):
            scenario = json.loads(line)
            # With caching off (and in a refused configuration) nothing is hashed.
            if scenario["config"]["enable_caching"] and scenario["steps"]:
                found.append(pytest.param(scenario, id=f"{name}:{number}"))
    return found


def keys_of(step: dict[str, Any]) -> RequestKeys:
    lora = step.get("lora")
    return RequestKeys(
        lora=LoraKey(name=lora["name"], path=lora["path"]) if lora else None,
        salt=step.get("salt"),
        multimodal=tuple(
            MultimodalItem(identifier=identifier, offset=offset, length=length)
            for identifier, offset, length in step.get("mm") or []
        ),
    )


@pytest.mark.parametrize("scenario", scenarios())
def test_requests_are_hashed_as_in_the_recorded_scenario(scenario: dict[str, Any]) -> None:
    config = scenario["config"]
    scheme = make_scheme(
        seed=DEFAULT_SEED_032 if config["seed"] is None else config["seed"],
        hash_block_tokens=config["hash_block_tokens"],
        algorithm=config["algorithm"],
        key_format=scenario["profile"],
    )
    chains: dict[str, HashChain] = {}
    for step in scenario["steps"]:
        if step["op"] == "open":
            chains[step["request"]] = HashChain(scheme, keys_of(step))
        if step["op"] in ("open", "append"):
            new = chains[step["request"]].extend(step["tokens"])
            assert [block_hash.hex() for block_hash in new] == step["expect"]["hashes"]
