"""Which keys a query sees, beside transformers' own mask functions."""

from typing import Any

import pytest
import torch
from transformers import masking_utils

from kvferry.worker.model.attention import causal_mask, visible_from

NUM_TOKENS = 10
MASKS: Any = masking_utils


@pytest.mark.parametrize("window", [None, *range(1, NUM_TOKENS + 2)])
def test_every_slice_sees_what_transformers_masks_let_it_see(window: int | None) -> None:
    sees = (
        MASKS.causal_mask_function
        if window is None
        else MASKS.sliding_window_causal_mask_function(window)
    )
    position = torch.arange(NUM_TOKENS)
    theirs = sees(0, 0, position[:, None], position[None, :])
    for end in range(1, NUM_TOKENS + 1):
        for start in range(end):
            first = visible_from(start, window)
            mask = causal_mask(end - start, end - first, window, torch.device("cpu"))
            if mask is None:
                mask = torch.ones(end - start, end - first, dtype=torch.bool)
                mask = mask.tril(diagonal=start - first)
            assert torch.equal(mask, theirs[start:end, first:end])
            assert mask[0, 0]
            assert not theirs[start:end, :first].any()


def test_a_single_query_and_a_start_within_one_window_need_no_mask() -> None:
    cpu = torch.device("cpu")
    needed = {
        (queries, context, window): causal_mask(queries, context, window, cpu) is not None
        for queries, context, window in [
            (1, 9, None),
            (1, 4, 4),
            (9, 9, None),
            (4, 4, 4),
            (5, 5, 4),
            (2, 9, None),
            (2, 5, 4),
        ]
    }
    assert [key for key, mask in needed.items() if mask] == [(5, 5, 4), (2, 9, None), (2, 5, 4)]
