"""The time to first token of a prompt that another engine computed, beside what vLLM itself has."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.engines.conftest import (
    STORE_BYTES,
    Service,
    assert_equal_outputs,
    make_service,
    tokens,
)
from tests.engines.engines import connector, running_engines

NUM_TOKENS = 2700
PROMPTS = [tokens(20 + i, NUM_TOKENS) for i in range(5)]
WARM_UP = tokens(30, 100)


@pytest.fixture
def service() -> Iterator[Service]:
    """As it is run: checking everything after every command would be timed too."""
    yield from make_service(STORE_BYTES, check_invariants=False)


@pytest.mark.long
def test_a_loaded_prompt_starts_in_a_tenth_of_the_time_and_as_fast_as_from_vllms_own_files(
    model: Path, service: Service, tmp_path: Path
) -> None:
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    settings: list[dict[str, Any]] = [
        {"kv_transfer_config": connector(service.address)},
        {"kv_transfer_config": files, "disable_hybrid_kv_cache_manager": True},
    ]
    computed_s, wanted = [], []
    with running_engines(model, settings[0]) as (writer,):
        writer.generate(WARM_UP)
        for prompt in PROMPTS:
            wanted.append(writer.generate(prompt))
            computed_s.append(writer.seconds)
        service.wait_cached_blocks(100 // 16 + 5 * (NUM_TOKENS // 16))
    with running_engines(model, settings[1]) as (writer,):
        for prompt in PROMPTS:
            writer.generate(prompt)
    loaded_s, files_s = [], []
    with running_engines(model, *settings) as (ours, theirs):
        for engine in (ours, theirs):
            engine.generate(tokens(31, 100))
        for prompt, output in zip(PROMPTS, wanted, strict=True):
            assert_equal_outputs(ours.generate(prompt), output)
            loaded_s.append(ours.seconds)
            theirs.generate(prompt)
            files_s.append(theirs.seconds)
    figures = {
        "computed_s": median(computed_s),
        "loaded_s": median(loaded_s),
        "loaded_from_files_s": median(files_s),
    }
    each = {"loaded_s": loaded_s, "loaded_from_files_s": files_s}
    print(json.dumps({"median": figures, "each": each}, indent=1))
    assert figures["loaded_s"] <= 0.1 * figures["computed_s"]
    assert figures["loaded_s"] <= 1.1 * figures["loaded_from_files_s"]
