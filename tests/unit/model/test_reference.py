"""The judge itself: it accepts the reference's choice, and near ties, and nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.proto.errors import ModelError
from kvferry.worker.model.reference import (
    TransformersReference,
)


@pytest.fixture(scope="module")
def reference(tiny_models: dict[str, Path]) -> TransformersReference:
    return TransformersReference(str(tiny_models["llama"]))


def fixed_logits(
    reference: TransformersReference, monkeypatch: pytest.MonkeyPatch, rows: list[list[float]]
) -> None:
    def logits(*_: Any) -> torch.Tensor:
        return torch.tensor(rows)

    monkeypatch.setattr(reference, "logits", logits)


def test_one_forward_pass_and_the_generation_loop_make_the_same_choices(
    reference: TransformersReference,
) -> None:
    prompt = [3, 1, 4, 1, 5]
    output = reference.generate(prompt, 12)
    assert len(output) == 12
    assert reference.logits(prompt, output).argmax(dim=-1).tolist() == output
    comparison = reference.compare(prompt, output)
    assert (comparison.equal, comparison.near_ties, comparison.first_difference) == (True, 0, None)
    assert comparison.min_gap > 1e-3


def test_the_first_wrong_token_is_named_and_no_token_is_no_difference(
    reference: TransformersReference,
) -> None:
    good = reference.generate([7, 8], 5)
    bad = [*good[:3], (good[3] + 1) % 61, good[4]]
    verdicts = [reference.compare([7, 8], output) for output in (good, bad, [])]
    assert [verdict.first_difference for verdict in verdicts] == [None, 3, None]
    assert [verdict.equal for verdict in verdicts] == [True, False, True]
    assert verdicts[2].min_gap == math.inf


def test_a_second_choice_within_the_gap_is_a_near_tie_and_the_comparison_goes_on(
    reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_logits(reference, monkeypatch, [[1.0, 1.0005, 0.0], [0.0, 5.0, 1.0], [2.0, 0.0, 1.0]])
    comparison = reference.compare([0], [0, 1, 0])
    assert (comparison.equal, comparison.near_ties, comparison.first_difference) == (True, 1, None)
    assert comparison.min_gap == pytest.approx(5e-4, rel=1e-2)
    assert reference.compare([0], [0, 1, 2]).first_difference == 2


def test_a_second_choice_beyond_the_gap_and_a_third_choice_are_differences(
    reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_logits(reference, monkeypatch, [[1.0, 1.0020, 0.0]])
    comparison = reference.compare([0], [0])
    assert (comparison.equal, comparison.near_ties, comparison.first_difference) == (False, 0, 0)
    assert comparison.min_gap == pytest.approx(2e-3, rel=1e-2)
    fixed_logits(reference, monkeypatch, [[1.0, 1.0005, 1.0004]])
    assert reference.compare([0], [2]).first_difference is None
    assert reference.compare([0], [0]).first_difference == 0


def test_settings_of_the_model_do_not_bend_the_greedy_choice(
    make_model: Any, reference: TransformersReference
) -> None:
    folder = make_model("llama")
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 5.0, "repetition_penalty": 9.0, "eos_token_id": 3}'
    )
    assert TransformersReference(str(folder)).generate([5, 5], 10) == reference.generate([5, 5], 10)


def test_a_missing_reference_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no reference model"):
        TransformersReference(str(tmp_path))
