"""Ranks that size their pools from memory, with a model, a coordinator and transfers."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.test_serving import ask, prompt, require_equal, with_router

from kvferry.cluster.serving.pool_size import KvSize
from kvferry.proto.errors import ConfigError, PromptTooLongError
from kvferry.worker import host_memory

# K and V of 8 tokens, 2 heads of 8 floats, in 2 layers.
BLOCK_BYTES = 2 * 8 * 2 * 8 * 4 * 2


def test_bytes_become_blocks_and_the_longest_request_is_bounded_to_what_fits(service: Any) -> None:
    size = KvSize(kv_bytes=21 * BLOCK_BYTES + 1)
    service.add("p0", "prefill")
    info = service.add("d0", "decode", kv_size=size, max_model_len="auto")
    assert (info.num_blocks, info.max_model_len) == (21, 160)
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100), 60)))
    require_equal(service, served)
    assert served.accounting.remote_hit_tokens == 96
    with pytest.raises(PromptTooLongError, match="max_model_len=160"):
        with_router(service.router(), lambda r: r.serve(ask("b", prompt(1, 101), 60)))


def test_too_few_bytes_for_the_models_longest_request_are_refused(service: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        service.add("d0", "decode", kv_size=KvSize(kv_bytes=21 * BLOCK_BYTES))
    assert refused.value.allowed == {"num_blocks": 8192 // 8 + 1, "max_model_len": 160}


def test_a_fraction_is_of_all_memory_and_what_was_measured_is_taken_off(
    hybrid_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = 50_000_000

    def metered(work: Callable[[], object]) -> int:
        work()
        return measured

    monkeypatch.setattr(host_memory, "total_bytes", lambda: 100_000_000)
    monkeypatch.setattr(host_memory, "peak_resident_bytes", metered)
    info = hybrid_service.add("d0", "decode", kv_size=KvSize(memory_fraction=0.6))
    # The measured pass of 64 tokens over 8 sequences keeps 57 tokens of one of them.
    kv_bytes = 60_000_000 - (measured - 8 * BLOCK_BYTES)
    assert info.num_blocks == kv_bytes // BLOCK_BYTES
    served = with_router(hybrid_service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    require_equal(hybrid_service, served)

    with pytest.raises(ConfigError, match="no memory for the KV cache") as refused:
        hybrid_service.add("d1", "decode", kv_size=KvSize(memory_fraction=0.5 - 0.001))
    assert refused.value.given["worker"] == "d1"
