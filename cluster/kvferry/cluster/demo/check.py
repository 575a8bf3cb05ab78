"""Judging the demo's outputs by plain transformers (docs/decisions/0003)."""

import os

import torch

from kvferry.cluster.progress import Progress
from kvferry.cluster.serving.router import Served
from kvferry.worker.model.loading import progress_bars_off
from kvferry.worker.model.reference import Comparison, TransformersReference
from kvferry.worker.model.sampling import sample


def check_outputs(
    model: str, dtype: str, served: tuple[Served, ...], progress: Progress
) -> tuple[Comparison, ...]:
    """Return one comparison per request, in order.

    Greedy outputs must be the reference's own choice; sampled ones must be what the request's
    seed chooses from the reference's logits.
    """
    progress("checking every output against plain transformers: loading the model")
    torch.set_num_threads(os.cpu_count() or 1)
    with progress_bars_off():
        reference = TransformersReference(model, dtype=dtype)
    comparisons = []
    for number, one in enumerate(served, start=1):
        comparison = _compare(reference, one)
        comparisons.append(comparison)
        verdict = "equal" if comparison.equal else f"differs at {comparison.first_difference}"
        progress(f"[{number}/{len(served)}] {one.request.request_id}: {verdict}")
    return tuple(comparisons)


def _compare(reference: TransformersReference, served: Served) -> Comparison:
    prompt, output = served.request.prompt_token_ids, served.output_token_ids
    params = served.request.sampling
    greedy = reference.compare(prompt, output)
    if params.temperature == 0:
        return greedy
    logits = reference.logits(prompt, output)
    difference = next(
        (
            index
            for index, token in enumerate(output)
            if sample(logits[index], params, len(prompt) + index) != token
        ),
        None,
    )
    return Comparison(
        equal=difference is None,
        near_ties=0,
        first_difference=difference,
        min_gap=greedy.min_gap,
    )
