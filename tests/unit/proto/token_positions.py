"""Every token of some runs, one by one: what the loops of a plan stand for."""

import numpy as np
import numpy.typing as npt

from kvferry.proto.token_runs import TokenRuns

Positions = npt.NDArray[np.int64]


def positions(runs: TokenRuns) -> Positions:
    """Return the positions in the sequence, in the order of the runs; int64 [num_tokens]."""
    return _spread(runs, runs.first, [loop.step for loop in runs.loops])


def source_tokens(runs: TokenRuns) -> Positions:
    """Return the source rank's local tokens, in the order of the runs; int64 [num_tokens]."""
    return _spread(runs, runs.source_first, [loop.source_step for loop in runs.loops])


def destination_tokens(runs: TokenRuns) -> Positions:
    """Return the destination rank's local tokens, likewise."""
    return _spread(runs, runs.destination_first, [loop.destination_step for loop in runs.loops])


def _spread(runs: TokenRuns, first: int, steps: list[int]) -> Positions:
    spread = np.array([first], dtype=np.int64)
    for loop, step in zip(runs.loops, steps, strict=True):
        spread = np.add.outer(spread, np.arange(loop.count, dtype=np.int64) * step).ravel()
    return np.add.outer(spread, np.arange(runs.run_tokens, dtype=np.int64)).ravel()
