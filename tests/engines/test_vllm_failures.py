"""Engines go on when kvferry does not, and lose nothing under pressure."""

import time
from pathlib import Path

import pytest
from tests.engines.conftest import Service, assert_equal_outputs, make_service, tokens
from tests.engines.engines import Engine, connector, running_engines

PROMPT = tokens(2, 2700)
# The load takes so many small steps that there is time to end it in the middle.
SMALL_STAGING = {"staging_mib": 1, "load_timeout_s": 5.0}


def wait_for_load(service: Service) -> None:
    """Wait until an engine has leased what it loads."""
    end_s = time.monotonic() + 20
    while not any(one.held.leases for one in service.instances()):
        assert time.monotonic() < end_s, "nothing is loaded"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_node_killed_during_a_load_costs_no_wrong_output_and_no_engine(
    model: Path, service: Service, plain: Engine, policy: str
) -> None:
    wanted = plain.generate(PROMPT, max_tokens=4)
    settings = {
        "kv_transfer_config": connector(service.address, policy=policy, **SMALL_STAGING),
        "enable_prefix_caching": False,
    }
    with running_engines(model, settings) as (engine,):
        assert_equal_outputs(engine.generate(PROMPT, max_tokens=4), wanted)
        service.wait_cached_blocks(2703 // 16)
        engine.send("generate", requests=[{"tokens": PROMPT, "max_tokens": 4}])
        wait_for_load(service)
        service.kill_node()
        found = engine.receive()
        assert engine.ask("metrics")["vllm:kvferry_failed_loads"] == 1
        if policy == "recompute":
            assert_equal_outputs(found, wanted)
        else:
            assert found[0]["finish_reason"] == "error"
        short = PROMPT[:100]
        assert_equal_outputs(engine.generate(short), plain.generate(short))
        service.start_node()
        end_s = time.monotonic() + 60
        while engine.generate(short)[0]["num_cached_tokens"] != 96:
            assert time.monotonic() < end_s, "the engine did not come back to its node"
        assert_equal_outputs(engine.generate(short), plain.generate(short))


def test_many_requests_under_eviction_with_aborts_stay_equal_and_leak_nothing(
    model: Path, plain: Engine
) -> None:
    prefixes = [tokens(10 + i, 160) for i in range(6)]
    requests = [
        {"tokens": prefixes[i % 6] + tokens(100 + i, 10 + i % 40), "max_tokens": 6}
        for i in range(200)
    ]
    wanted = plain.ask("generate", requests=requests)
    for i in range(3, 200, 7):
        requests[i]["abort_after_steps"] = i % 5
    # A request takes 7 blocks of the engine's and 13 of the store's, and there are 6 prefixes.
    for service in make_service(70 * 16 * 30 * 2 * 3 * 64 * 4):
        settings = {
            "kv_transfer_config": connector(service.address),
            "num_gpu_blocks_override": 40,
            "max_model_len": 512,
        }
        with running_engines(model, settings) as (engine,):
            free = engine.ask("settle", timeout_s=20)
            found = engine.ask("step_requests", requests=requests, at_once=4)
            assert len(found) == 200
            for index, one in enumerate(wanted):
                result = found[f"r{index}"]["tokens"]
                if "abort_after_steps" not in requests[index]:
                    assert result == one["tokens"], index
            assert engine.ask("settle", timeout_s=20) == free
            counts = engine.ask("metrics")
            assert counts["vllm:kvferry_loaded_blocks"] > 0
            end_s = time.monotonic() + 20
            while True:
                (status,) = service.instances()
                held = status.held
                if not (held.leases or held.reservations or held.loads):
                    break
                assert time.monotonic() < end_s, held
            assert status.num_free_blocks == 69
