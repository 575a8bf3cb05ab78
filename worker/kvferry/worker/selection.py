"""What a fetch asks for when it wants a part of its blocks: some layers, heads and tokens of them.

Pure: no tensors. A selection is as small as the plan it comes from, whatever the number of tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import BadInputError
from kvferry.proto.reshard import Transfer
from kvferry.proto.token_runs import Positions, tokens_of_runs

BlockTable = npt.NDArray[np.int64]
"""The block ids of a sequence on one rank, in order."""

MAX_LOOPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedRuns:
    """Runs of `run_tokens` consecutive tokens, the first from `first` on.

    They are repeated by up to two `loops` of (count, step in tokens), the outer one first.
    """

    first: int
    run_tokens: int
    loops: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all runs."""
        return math.prod(count for count, _ in self.loops) * self.run_tokens

    def tokens(self) -> Positions:
        """Return the tokens in the order of the runs; int64 [num_tokens]."""
        return tokens_of_runs(self.first, self.run_tokens, self.loops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Layers (counted within the group), KV heads (of the model), and tokens of the asked blocks.

    Tokens are counted from the first asked block on, as the rank that serves them holds them: token
    t lies in asked block `t // block_tokens` at `t % block_tokens`.
    """

    layers: range
    heads: range
    runs: tuple[StridedRuns, ...]

    def tokens(self, num_held_tokens: int) -> Positions:
        """Return the tokens, ascending; `num_held_tokens` are those of all asked blocks.

        Raises:
            BadInputError: no tokens, some beyond the asked blocks, or one twice.
        """
        for runs in self.runs:
            _require_within(runs, num_held_tokens)
        # Before any array of that size is made.
        num_tokens = sum(runs.num_tokens for runs in self.runs)
        if not 0 < num_tokens <= num_held_tokens:
            raise BadInputError(
                "a selection names each of its tokens once",
                given=f"{num_tokens} tokens",
                allowed=f"1 to {num_held_tokens}",
            )
        tokens = np.concatenate([runs.tokens() for runs in self.runs])
        tokens.sort()
        if (np.diff(tokens) == 0).any():
            raise BadInputError(
                "a selection names each of its tokens once",
                given=int(tokens[:-1][np.diff(tokens) == 0][0]),
            )
        return tokens


def _require_within(runs: StridedRuns, num_held_tokens: int) -> None:
    sizes = [runs.run_tokens, *(count for count, _ in runs.loops)]
    if min(sizes) < 1 or len(runs.loops) > MAX_LOOPS:
        raise BadInputError(
            "no runs of tokens",
            given=str(runs),
            allowed=f"sizes of at least 1, at most {MAX_LOOPS} loops",
        )
    end = runs.first + sum((count - 1) * step for count, step in runs.loops) + runs.run_tokens
    if not 0 <= runs.first < end <= num_held_tokens:
        raise BadInputError(
            "tokens beyond the asked blocks",
            given=f"{runs.first} to {end - 1}",
            allowed=f"0 to {num_held_tokens - 1}",
        )


def selection_of(transfer: Transfer, *, skipped_tokens: int) -> Selection:
    """Return what a transfer asks of its source rank.

    `skipped_tokens` are the local tokens of that rank before the first asked block.

    Raises:
        BadInputError: the transfer has tokens before that block.
    """
    first = min(runs.source_first for runs in transfer.runs)
    if skipped_tokens > first:
        raise BadInputError(
            "the transfer begins before the first asked block",
            given=first,
            allowed=f"at least {skipped_tokens}",
        )
    return Selection(
        layers=transfer.layers,
        heads=transfer.heads,
        runs=tuple(
            StridedRuns(
                first=runs.source_first - skipped_tokens,
                run_tokens=runs.run_tokens,
                loops=tuple((loop.count, loop.source_step) for loop in runs.loops),
            )
            for runs in transfer.runs
        ),
    )
