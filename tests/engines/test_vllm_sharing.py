"""Engines share prefixes through kvferry, whatever their block size, and after their death."""

from pathlib import Path
from typing import Any

from tests.engines.conftest import Service, assert_equal_outputs, tokens
from tests.engines.engines import Engine, connector, running_engines

PROMPT = tokens(1, 700)


def external(engine: Engine) -> dict[str, float]:
    """Return the engine's counts of its external cache, and ours, which agree."""
    found = engine.ask("metrics")
    assert (
        found["vllm:kvferry_external_query_tokens"] == found["vllm:external_prefix_cache_queries"]
    )
    assert found["vllm:kvferry_external_hit_tokens"] == found["vllm:external_prefix_cache_hits"]
    return {
        name.removeprefix("vllm:kvferry_"): count
        for name, count in found.items()
        if name.startswith("vllm:kvferry_")
    }


def test_a_prefix_outlives_its_engine_and_is_found_by_others_of_any_block_size(
    model: Path, service: Service, plain: Engine
) -> None:
    wanted = plain.generate(PROMPT, max_tokens=8)
    settings = {"kv_transfer_config": connector(service.address)}
    with running_engines(model, settings) as (first,):
        assert_equal_outputs(first.generate(PROMPT, max_tokens=8), wanted)
        # 700 tokens of the prompt and 7 of the output have their KV: 44 whole blocks of 16.
        service.wait_cached_blocks(44)
        first.kill()
    with running_engines(model, settings, {**settings, "block_size": 64}) as (same, other):
        found = same.generate(PROMPT, max_tokens=8)
        assert_equal_outputs(found, wanted)
        assert found[0]["num_cached_tokens"] == 699 // 32 * 32
        found = other.generate(PROMPT, max_tokens=8)
        assert_equal_outputs(found, wanted)
        assert found[0]["num_cached_tokens"] == 699 // 64 * 64
        for engine, hits in ((same, 672), (other, 640)):
            engine.ask("settle", timeout_s=20)
            counts = external(engine)
            assert counts["external_hit_tokens"] == hits
            assert counts["loaded_blocks"] == hits / 16
            # What the store has is not saved again; of what is generated nobody asks beforehand.
            assert counts["saved_blocks"] <= 1
    service.wait_cached_blocks(44)


def test_a_salt_keeps_tenants_apart_and_a_reset_makes_everything_unfindable(
    model: Path, service: Service
) -> None:
    settings = {
        "kv_transfer_config": connector(service.address),
        "enable_prefix_caching": False,
    }
    with running_engines(model, settings) as (engine,):

        def cached(**fields: Any) -> int:
            (found,) = engine.generate(PROMPT[:100], **fields)
            return int(found["num_cached_tokens"])

        assert cached() == 0
        service.wait_cached_blocks(6)
        assert cached() == 96
        assert cached(salt="a") == 0
        service.wait_cached_blocks(12)
        assert cached(salt="a") == 96
        assert cached(salt="b") == 0
        service.wait_cached_blocks(18)
        # vLLM resets nothing while a finished request's blocks are kept for a save.
        engine.ask("settle", timeout_s=20)
        assert engine.ask("reset", external=True)
        service.wait_cached_blocks(0)
        assert cached() == 0
        service.wait_cached_blocks(6)
        assert cached() == 96
        assert cached(salt="a") == 0


def test_other_weights_never_share(model: Path, service: Service) -> None:
    settings = [
        {"kv_transfer_config": connector(service.address, weight_version=version)}
        for version in ("one", "two")
    ]
    with running_engines(model, *settings) as (one, two):
        one.generate(PROMPT[:100])
        service.wait_cached_blocks(6)
        (found,) = two.generate(PROMPT[:100])
        assert found["num_cached_tokens"] == 0
        assert {status.info.identity.weight_version for status in service.instances()} == {
            "one",
            "two",
        }
