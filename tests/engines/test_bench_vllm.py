"""vLLM's side of `kvferry bench core`, in the interpreter that KVFERRY_VLLM_PYTHON names."""

import os

import pytest

from kvferry.cluster.bench.vllm_process import running_vllm

PYTHON = os.environ.get("KVFERRY_VLLM_PYTHON")

pytestmark = pytest.mark.skipif(PYTHON is None, reason="KVFERRY_VLLM_PYTHON is not set")


def test_vllm_does_the_same_operations_and_grants_frees_and_finds_whole_requests() -> None:
    assert PYTHON is not None
    with running_vllm(PYTHON) as vllm:
        assert vllm.version.startswith("0.32.")
        for num_blocks in (256, 1):
            figures = vllm.ask("time_cycle", num_blocks)
            assert set(figures) == {"allocate", "free", "lookup"}
        memory = vllm.ask("measure_memory", 10_000)
        assert 100 < memory["empty"] < memory["hashed"]
