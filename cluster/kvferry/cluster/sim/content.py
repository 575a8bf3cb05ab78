"""What every block must hold: the keys and values of a token tell all tokens before it.

So the model notices a block of another prompt, version or place, and a value that never came.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.cluster.serving.sequence import Run
from kvferry.proto.errors import InvariantError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import BlockHash, RequestId
from kvferry.proto.placement import holdings, shape_of
from kvferry.proto.scheme import HashScheme
from kvferry.worker.kv_memory import KvMemory

_PRIME = 999_983
VOCABULARY = 211

Values = npt.NDArray[np.float32]


def states_of(tokens: Sequence[int], keys: RequestKeys, weights: str) -> list[int]:
    """Return a number for every token that stands for it, all before it, the keys and the weights.

    Numbers are below a million: float32 holds them exactly, with eighths.
    """
    state, states = sum((keys.salt or "").encode()) + 257 * int(weights), []
    for token in tokens:
        state = (state * 1103 + token * 7919 + 1) % _PRIME
        states.append(state)
    return states


def answer_of(
    tokens: Sequence[int], keys: RequestKeys, weights: str, num_tokens: int
) -> tuple[int, ...]:
    """Return what the model says after a prompt."""
    grown = list(tokens)
    for _ in range(num_tokens):
        grown.append(states_of(grown, keys, weights)[-1] % VOCABULARY)
    return tuple(grown[len(tokens) :])


class Cells:
    """The memory of one rank: where which tokens, layers and heads lie in it.

    Args:
        memory: of the rank.
    """

    def __init__(self, memory: KvMemory) -> None:
        layout = memory.layout
        held = holdings(layout, shape_of(memory.identity))[memory.rank]
        offsets = np.arange(layout.virtual_block_tokens)
        shards, interleave = layout.token_shards, layout.interleave
        self.virtual_block_tokens = layout.virtual_block_tokens
        self._is_here = offsets // interleave % shards == held.token_shard
        self._slots = offsets // (interleave * shards) * interleave + offsets % interleave
        self._layers: list[Values] = [layer.numpy() for layer in memory.layers]
        heads = np.array(held.heads, np.float32) / 8
        # By layer and side: what is added to a token's number for each head that lies here.
        self._shifts = [
            [(layer / 4 + side / 2 + heads)[None, :, None] for side in (0, 1)]
            for layer in held.layers
        ]

    def write(self, table: Sequence[int], start: int, states: Sequence[int]) -> None:
        """Write the tokens from a position on, those of them that lie here."""
        here, blocks, slots = self._places(table, start, start + len(states))
        values = np.array(states, np.float32)[here - start][:, None, None]
        for layer, shifts in zip(self._layers, self._shifts, strict=True):
            for side, shift in enumerate(shifts):
                layer[side, blocks, slots] = values + shift

    def require(self, table: Sequence[int], start: int, states: Sequence[int]) -> None:
        """Refuse what lies here of the tokens from a position on, if it is something else.

        Args:
            table: the blocks of the sequence from its first token on.
            start: the position of the first token.
            states: of the tokens, as `states_of`.

        Raises:
            InvariantError: naming the first that is wrong, and both values.
        """
        here, blocks, slots = self._places(table, start, start + len(states))
        values = np.array(states, np.float32)[here - start][:, None, None]
        for number, (layer, shifts) in enumerate(zip(self._layers, self._shifts, strict=True)):
            for side, shift in enumerate(shifts):
                found, expected = layer[side, blocks, slots], values + shift
                if not (found == expected).all():
                    wrong = int(np.argmax((found != expected).any(axis=(1, 2))))
                    raise InvariantError(
                        f"position {here[wrong]}: block {blocks[wrong]}, slot {slots[wrong]}, "
                        f"layer {number}",
                        given=str(found[wrong].tolist()),
                        allowed=str(expected[wrong].tolist()),
                    )

    def _places(
        self, table: Sequence[int], start: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return those of some positions that lie here, and the block and slot of each."""
        positions = np.arange(start, end)
        indexes, offsets = np.divmod(positions, self.virtual_block_tokens)
        is_here = self._is_here[offsets]
        return positions[is_here], np.array(table)[indexes[is_here]], self._slots[offsets[is_here]]


@dataclass(slots=True)
class KnownContent:
    """The content of every hash that a workload can make, under each weight version."""

    scheme: HashScheme
    # Of the sequence that a hash ends, and how many tokens that are.
    _states: dict[tuple[str, BlockHash], tuple[list[int], int]] = field(default_factory=dict)

    def learn(self, tokens: Sequence[int], keys: RequestKeys, weights: str) -> None:
        """Take in a sequence of tokens."""
        size, states = self.scheme.hash_block_tokens, states_of(tokens, keys, weights)
        for index, block_hash in enumerate(hash_tokens(self.scheme, tokens, keys)):
            self._states[weights, block_hash] = states, (index + 1) * size

    def require(self, cells: Cells, weights: str, block_id: int, key: BlockHash) -> None:
        """Refuse a block that holds something else than its hash's content.

        Args:
            cells: of the rank where it lies.
            weights: of the model that wrote it.
            block_id: which.
            key: the last hash that it covers.

        Raises:
            InvariantError: naming both.
        """
        states, end = self._states[weights, key]
        size = cells.virtual_block_tokens
        cells.require([block_id], 0, states[end - size : end])


class StateModel:
    """One rank's part of a forward pass: it writes its own tokens, and reads all before them.

    Args:
        memory: of the rank.
        violated: hears of what was read and is wrong.
    """

    def __init__(self, memory: KvMemory, violated: Callable[[Exception], None]) -> None:
        self.cells = Cells(memory)
        self._violated = violated
        self._weights = memory.identity.weight_version
        self._tokens: dict[RequestId, list[int]] = {}

    def forward(self, runs: tuple[Run, ...]) -> dict[RequestId, int]:
        """Return the next token of each run that samples."""
        sampled = {}
        for run in runs:
            state = self._pass(run)
            if run.sample:
                sampled[run.request.request_id] = state % VOCABULARY
        return sampled

    def _pass(self, run: Run) -> int:
        asked, end = run.request, run.start_position + len(run.token_ids)
        known = [*asked.prompt_token_ids, *asked.output_token_ids]
        tokens = self._tokens.setdefault(asked.request_id, known)
        tokens[run.start_position : end] = run.token_ids
        states = states_of(tokens[:end], asked.keys, self._weights)
        (table,) = run.block_tables
        self.cells.write(table, run.start_position, states[run.start_position :])
        try:
            self.cells.require(table, 0, states)
        except InvariantError as error:
            self._violated(error)
        return states[-1]
