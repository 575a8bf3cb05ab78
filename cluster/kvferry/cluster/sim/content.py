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
from kvferry.proto.scheme import HashScheme
from kvferry.worker.kv_memory import KvMemory

_PRIME = 999_983
VOCABULARY = 211

Values = npt.NDArray[np.float32]


def states_of(tokens: Sequence[int], keys: RequestKeys) -> list[int]:
    """Return a number for every token that stands for it, all before it, and the keys.

    Numbers are below a million: float32 holds them exactly, with quarters.
    """
    state, states = sum((keys.salt or "").encode()), []
    for token in tokens:
        state = (state * 1103 + token * 7919 + 1) % _PRIME
        states.append(state)
    return states


def answer_of(tokens: Sequence[int], keys: RequestKeys, num_tokens: int) -> tuple[int, ...]:
    """Return what the model says after a prompt."""
    grown = list(tokens)
    for _ in range(num_tokens):
        grown.append(states_of(grown, keys)[-1] % VOCABULARY)
    return tuple(grown[len(tokens) :])


@dataclass(slots=True)
class KnownContent:
    """The content of every hash that a workload can make."""

    scheme: HashScheme
    # Of the sequence that a hash ends, and how many tokens that are.
    _states: dict[BlockHash, tuple[list[int], int]] = field(default_factory=dict)

    def learn(self, tokens: Sequence[int], keys: RequestKeys) -> None:
        """Take in a sequence of tokens."""
        size, states = self.scheme.hash_block_tokens, states_of(tokens, keys)
        for index, block_hash in enumerate(hash_tokens(self.scheme, tokens, keys)):
            self._states[block_hash] = states, (index + 1) * size

    def require(self, layers: Sequence[Values], block_id: int, key: BlockHash) -> None:
        """Refuse a block that holds something else than its hash's content.

        Args:
            layers: [2, num_blocks, tokens, heads, head_size] each.
            block_id: which.
            key: the last hash that it covers.

        Raises:
            InvariantError: naming both.
        """
        tokens = layers[0].shape[2]
        states, end = self._states[key]
        expected = states[end - tokens : end]
        _require(layers, np.full(tokens, block_id), np.arange(tokens), expected)


class StateModel:
    """The forward pass of an instance of one rank: reads all before it, writes its own tokens.

    Args:
        memory: of the instance.
        violated: hears of what was read and is wrong.
    """

    def __init__(self, memory: KvMemory, violated: Callable[[Exception], None]) -> None:
        self._violated = violated
        self.layers: list[Values] = [layer.numpy() for layer in memory.layers]
        self._block_tokens = memory.layout.block_tokens
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
        states = states_of(tokens[:end], asked.keys)
        positions = np.arange(end)
        (table,) = run.block_tables
        blocks = np.array(table)[positions // self._block_tokens]
        slots = positions % self._block_tokens
        written = slice(run.start_position, end)
        for number, layer in enumerate(self.layers):
            for side in (0, 1):
                values = np.array(states[written], np.float32) + _shift(number, side)
                layer[side, blocks[written], slots[written]] = values[:, None, None]
        try:
            _require(self.layers, blocks, slots, states)
        except InvariantError as error:
            self._violated(error)
        return states[-1]


def _shift(layer: int, side: int) -> float:
    return layer / 4 + side / 2


def _require(
    layers: Sequence[Values],
    blocks: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    states: Sequence[int],
) -> None:
    states_here = np.array(states, np.float32)[:, None, None]
    for number, layer in enumerate(layers):
        for side in (0, 1):
            found, expected = layer[side, blocks, slots], states_here + _shift(number, side)
            is_wrong = (found != expected).any(axis=(1, 2))
            if is_wrong.any():
                wrong = int(np.argmax(is_wrong))
                raise InvariantError(
                    f"position {wrong}: block {blocks[wrong]}, slot {slots[wrong]}, layer {number}",
                    given=str(found[wrong].ravel()[0]),
                    allowed=str(expected[wrong].ravel()[0]),
                )
