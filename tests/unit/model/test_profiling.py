from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.worker.device import CpuDevice
from kvferry.worker.model import profiling
from kvferry.worker.model.loading import LoadedModel, load_model
from kvferry.worker.model.profiling import non_kv_peak_bytes
from kvferry.worker.model.runner import ModelRunner, SequenceSlice

BLOCK_TOKENS = 16


class MeteredDevice(CpuDevice):
    """Measures nothing: says that so many bytes were in use."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 10_000_000


@pytest.fixture(scope="module")
def loaded(tiny_hybrid_model: Path) -> LoadedModel:
    return load_model(str(tiny_hybrid_model))


@pytest.mark.parametrize(
    ("token_budget", "max_running", "lengths"),
    [(64, 1, [64]), (64, 8, [57] + [1] * 7), (3, 8, [1, 1, 1]), (9000, 1, [8192])],
)
def test_the_measured_pass_is_as_full_as_a_step_and_its_blocks_do_not_count(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    token_budget: int,
    max_running: int,
    lengths: list[int],
) -> None:
    seen: list[list[SequenceSlice]] = []
    monkeypatch.setattr(ModelRunner, "forward", lambda _, batch: seen.append(batch))
    peak = non_kv_peak_bytes(
        loaded,
        MeteredDevice(),
        block_tokens=BLOCK_TOKENS,
        token_budget=token_budget,
        max_running=max_running,
    )
    ((batch),) = seen
    assert [len(piece.token_ids) for piece in batch] == lengths
    num_blocks = -(-lengths[0] // BLOCK_TOKENS)
    # K and V of 2 layers, 16 tokens, 2 heads of 8 floats.
    assert peak == 10_000_000 - num_blocks * 2 * 2 * 16 * 2 * 8 * 4


def test_the_weights_are_in_what_is_measured(loaded: LoadedModel) -> None:
    weights = sum(weight.nbytes for weight in loaded.model.parameters())
    peak = profiling.non_kv_peak_bytes(
        loaded, CpuDevice(), block_tokens=BLOCK_TOKENS, token_budget=64, max_running=4
    )
    assert weights < peak < CpuDevice().total_bytes()
