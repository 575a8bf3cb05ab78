"""Tokens are a function of logits, parameters, seed and position, and of nothing else."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.worker.model.sampling import SamplingParams, sample

ROW = torch.tensor([0.5, 2.0, -1.0, 2.0, 1.0])


def draw_many(row: torch.Tensor, params: SamplingParams, count: int = 4000) -> Counter[int]:
    return Counter(sample(row, params, position) for position in range(count))


def test_greedy_takes_the_first_index_among_equals() -> None:
    assert sample(ROW, SamplingParams(), 0) == 1
    assert sample(torch.zeros(70_000), SamplingParams(), 9) == 0


def test_greedy_works_on_bfloat16_rows() -> None:
    assert sample(ROW.to(torch.bfloat16), SamplingParams(), 0) == 1


@settings(deadline=None, max_examples=50)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=20),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.01, 5),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 25),
        seed=st.integers(-(2**70), 2**70),
    ),
    position=st.integers(0, 10_000),
)
def test_a_draw_repeats_exactly_and_is_among_the_top_k(
    logits: list[float], params: SamplingParams, position: int
) -> None:
    row = torch.tensor(logits)
    token = sample(row, params, position)
    assert sample(row.clone(), params, position) == token
    allowed = sorted(range(len(logits)), key=lambda index: (-row[index].item(), index))
    assert token in allowed[: params.top_k or None]


def test_a_draw_depends_on_seed_and_on_position() -> None:
    row = torch.zeros(1000)
    one = [sample(row, SamplingParams(temperature=1.0, seed=1), at) for at in range(20)]
    two = [sample(row, SamplingParams(temperature=1.0, seed=2), at) for at in range(20)]
    assert one != two
    assert len(set(one)) > 15


def test_known_draws_stay_what_they_are() -> None:
    """A change here would change the text of every sampled request."""
    row = torch.arange(50) / 10
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=7)
    assert [sample(row, params, at) for at in range(8)] == [30, 37, 44, 49, 49, 36, 30, 49]


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    counts = draw_many(ROW, SamplingParams(temperature=0.7, seed=3))
    expected = torch.softmax(ROW.double() / 0.7, dim=0)
    for token, probability in enumerate(expected.tolist()):
        # Five standard deviations; the draws are fixed by the seed, so this never flickers.
        margin = 5 * math.sqrt(probability * (1 - probability) / 4000)
        assert abs(counts[token] / 4000 - probability) < margin


def test_top_k_keeps_the_likeliest_and_the_lower_id_among_equals() -> None:
    assert set(draw_many(ROW, SamplingParams(temperature=5.0, top_k=1), 200)) == {1}
    assert set(draw_many(ROW, SamplingParams(temperature=5.0, top_k=3), 200)) == {1, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = torch.log(torch.tensor([0.1, 0.5, 0.4]))
    assert set(draw_many(row, SamplingParams(temperature=1.0, top_p=0.45), 300)) == {1}
    assert set(draw_many(row, SamplingParams(temperature=1.0, top_p=0.8), 300)) == {1, 2}
    assert set(draw_many(row, SamplingParams(temperature=1.0, top_p=0.95), 300)) == {0, 1, 2}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    row = torch.tensor([-3e38, 1.0, 1.5, 3e38, -math.inf])
    assert set(draw_many(row, SamplingParams(temperature=1e-300), 20)) == {3}


@pytest.mark.parametrize("row", [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_largest_are_refused(row: list[float], temperature: float) -> None:
    with pytest.raises(BadInputError, match=r"given: position=4, largest=(nan|inf|-inf); allowed"):
        sample(torch.tensor(row), SamplingParams(temperature=temperature), 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1.0),
        ("seed", 1.5),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("ignore_eos", 1),
        ("stop_token_ids", [3]),
        ("stop_token_ids", (3, -1)),
        ("stop_token_ids", (True,)),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"bad sampling parameter {name}; given: .*; allowed: "):
        SamplingParams(**{name: value})
