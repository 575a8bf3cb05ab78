"""Whether outputs that differ from the undisturbed run's are wrong (docs/decisions/0003)."""

from dataclasses import replace

from kvferry.cluster.chaos.report import ChaosResult
from kvferry.cluster.progress import Progress


def judge(result: ChaosResult, model: str, progress: Progress) -> ChaosResult:
    """Return the result with its differences told apart: wrong ones, and near ties.

    Where the two best logits are nearly equal, how a prompt was cut into passes may decide; plain
    transformers says whether that is so.
    """
    differences = result.tally.differences
    if not differences:
        return result
    from kvferry.worker.model.loading import progress_bars_off
    from kvferry.worker.model.reference import TransformersReference

    progress(f"asking plain transformers about {len(differences)} outputs that differ")
    with progress_bars_off():
        reference = TransformersReference(model)
    wrong = tuple(one for one in differences if not reference.compare(one.prompt, one.output).equal)
    return replace(result, wrong=wrong)
