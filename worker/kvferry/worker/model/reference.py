"""What plain transformers says about generated tokens; nothing of kvferry computes here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig as _GenerationConfig

from kvferry.proto.errors import ModelError

# Its constructor is not typed.
GenerationConfig: Any = _GenerationConfig

NEAR_TIE_GAP = 1e-3
"""Two logits closer than this may swap places by rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One request's tokens against the reference's greedy choice, each given the same prefix.

    `near_ties` counts the places where the reference's second choice was taken and accepted.
    `first_difference` is an index into the output. `min_gap` is the smallest gap between the
    reference's two best logits at any output position (infinite without output).
    """

    equal: bool
    near_ties: int
    first_difference: int | None
    min_gap: float


class TransformersReference:
    """A model run by transformers alone.

    Args:
        model_path: folder of the model.
        dtype: float32, bfloat16 or float16.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, model_path: str, *, dtype: str = "float32") -> None:
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"no reference model ({error})", given=model_path) from error
        # `generate` fills what its config leaves open from the model's own one: end tokens, but
        # also a repetition penalty, which would no longer be the greedy choice.
        self._model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits that each output token was to be chosen from, in one forward pass.

        Returns:
            shape [len(output_ids), vocab_size]; row `i` has seen the prompt and `i` outputs.
        """
        tokens = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        output = self._model(
            input_ids=tokens, use_cache=False, logits_to_keep=max(1, len(output_ids))
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def compare(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Comparison:
        """Judge one request's output.

        A token must be the reference's first choice; where the gap to its second choice is at most
        `NEAR_TIE_GAP`, that one is accepted too, and the comparison goes on from it.
        """
        if not output_ids:
            return Comparison(equal=True, near_ties=0, first_difference=None, min_gap=math.inf)
        best = self.logits(prompt_ids, output_ids).topk(2)
        choices: list[list[int]] = best.indices.tolist()
        gaps: list[float] = (best.values[:, 0] - best.values[:, 1]).tolist()
        near_ties = 0
        first_difference = None
        for index, (token, (first, second), gap) in enumerate(
            zip(output_ids, choices, gaps, strict=True)
        ):
            if token == first:
                continue
            if token != second or gap > NEAR_TIE_GAP:
                first_difference = index
                break
            near_ties += 1
        return Comparison(
            equal=first_difference is None,
            near_ties=near_ties,
            first_difference=first_difference,
            min_gap=min(gaps),
        )

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return `max_tokens` greedy tokens by transformers' own loop; end tokens do not end it."""
        greedy = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_tokens,
        )
        tokens = torch.tensor([list(prompt_ids)])
        output = self._model.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy
        )
        generated: list[int] = output[0, len(prompt_ids) :].tolist()
        return generated
