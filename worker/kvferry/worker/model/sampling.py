"""Choosing the next token from logits, by values of the request alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import BadInputError, ConfigError

if TYPE_CHECKING:
    # Routers import this module for its parameters and need not load torch.
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    `temperature` 0 is greedy. `top_k` 0 is off. `max_tokens` bounds the generated tokens.
    `ignore_eos` goes on after the model's own end tokens; `stop_token_ids` always end the text.

    Raises:
        ConfigError: a value out of its range, naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        _require(
            _is_number(temperature) and math.isfinite(temperature) and temperature >= 0,
            "temperature",
            temperature,
            "a finite number >= 0",
        )
        _require(_is_number(top_p) and 0 < top_p <= 1, "top_p", top_p, "above 0, up to 1")
        _require(type(self.top_k) is int and self.top_k >= 0, "top_k", self.top_k, "integer >= 0")
        _require(type(self.seed) is int, "seed", self.seed, "an integer")
        _require(
            type(self.max_tokens) is int and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "integer >= 1",
        )
        _require(type(self.ignore_eos) is bool, "ignore_eos", self.ignore_eos, "True or False")
        _require(
            type(self.stop_token_ids) is tuple
            and all(type(token) is int and token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "a tuple of integers >= 0",
        )


def sample(logits_row: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Return the token that follows.

    Greedy takes the first index among equals. Otherwise the choice depends on the logits, the
    request's seed and the position alone, so that batching, preemption and a move to another
    instance do not change the text.

    Args:
        logits_row: shape [vocab_size].
        params: the request's parameters.
        position: of the token to be chosen, counted from the prompt's first token.

    Raises:
        BadInputError: the logits hold NaN, or their largest is not finite.
    """
    logits = logits_row.detach().float().cpu().numpy()
    largest = float(logits.max())
    if not math.isfinite(largest):
        raise BadInputError(
            "the model's logits cannot be chosen from",
            given={"position": position, "largest": largest},
            allowed="a finite largest logit",
        )
    if params.temperature == 0:
        return int(np.argmax(logits))
    candidates, probabilities = _candidates(logits.astype(np.float64), params)
    cumulative = np.cumsum(probabilities)
    drawn = _uniform(params.seed, position) * cumulative[-1]
    return int(candidates[np.searchsorted(cumulative, drawn)])


def _candidates(
    logits: npt.NDArray[np.float64], params: SamplingParams
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Return the tokens that may be drawn, likeliest first, and their unnormalised weights."""
    # Stable: equal logits keep the order of their ids on every machine.
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    # Relative to the best, so that only what rounds to weight 0 can overflow (to -inf).
    with np.errstate(over="ignore"):
        weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    cumulative = np.cumsum(weights)
    # The smallest set that reaches top_p, so at least one.
    num_kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
    return order[:num_kept], weights[:num_kept]


def _uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is a function of both, the same on every platform."""
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _require(good: bool, name: str, given: Any, allowed: str) -> None:
    if not good:
        raise ConfigError(f"bad sampling parameter {name}", given=given, allowed=allowed)
