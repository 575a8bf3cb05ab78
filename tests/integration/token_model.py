"""A model whose KV says which token it is of, and workers that are slow, forgetful or deaf.

The KV of a token says its id and its position. In each pass the model looks at all tokens of the
sequence so far: whoever reads a block that was never written, or one that another request's
transfer wrote into, ends the engine with what was found.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.builders import make_identity

from kvferry.cluster.serving.sequence import Run
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation, RequestId
from kvferry.proto.layout import Layout
from kvferry.worker.device import open_device
from kvferry.worker.frames import Header
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.paths import Path
from kvferry.worker.pull import PullOutcome
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import FetchAsk

BLOCK_TOKENS = 4
IDENTITY = make_identity(num_layers=2)
SCHEME = make_scheme(hash_block_tokens=BLOCK_TOKENS)
LAYOUT = Layout(block_tokens=BLOCK_TOKENS)


def prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt that shares no token with those of other numbers."""
    return tuple(range(200 * number, 200 * number + num_tokens))


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return sum(tokens) % 199


def answer(tokens: Sequence[int], num_tokens: int = 1) -> tuple[int, ...]:
    """The right output of a prompt."""
    grown = list(tokens)
    for _ in range(num_tokens):
        grown.append(next_token(grown))
    return tuple(grown[len(tokens) :])


class TokenMemory:
    """Writes the KV of tokens into blocks, and finds it there or says what it found instead."""

    def __init__(self, memory: KvMemory) -> None:
        self._layers = memory.layers

    def write(self, table: Sequence[int], tokens: Sequence[int], start: int = 0) -> None:
        for position in range(start, len(tokens)):
            for layer, side, cell, value in self._cells(table, tokens, position):
                layer[side, cell[0], cell[1]] = value

    def require(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        for position in range(len(tokens)):
            for layer, side, cell, value in self._cells(table, tokens, position):
                found = layer[side, cell[0], cell[1]]
                if not torch.all(found == value):
                    raise AssertionError(
                        f"token {tokens[position]} at {position} in block {cell[0]}: {found}"
                    )

    def _cells(
        self, table: Sequence[int], tokens: Sequence[int], position: int
    ) -> Iterator[tuple[torch.Tensor, int, tuple[int, int], float]]:
        block, slot = divmod(position, BLOCK_TOKENS)
        for number, layer in enumerate(self._layers):
            for side in (0, 1):
                value = tokens[position] * 512.0 + position + number / 4 + side / 2
                yield layer, side, (table[block], slot), value


class TokenModel:
    """The forward pass: reads everything before it, writes its own tokens, samples by their sum."""

    def __init__(self, memory: KvMemory) -> None:
        self.memory = TokenMemory(memory)
        self.tables: dict[str, tuple[BlockId, ...]] = {}
        self.before_run: Callable[[Run], None] = lambda _: None
        self._tokens: dict[RequestId, list[int]] = {}

    def forward(self, runs: tuple[Run, ...]) -> dict[RequestId, int]:
        sampled = {}
        for run in runs:
            self.before_run(run)
            asked, end = run.request, run.start_position + len(run.token_ids)
            known = [*asked.prompt_token_ids, *asked.output_token_ids]
            tokens = self._tokens.setdefault(asked.request_id, known)
            tokens[run.start_position : end] = run.token_ids
            (table,) = run.block_tables
            self.tables[asked.request_id] = table
            self.memory.write(table, tokens[:end], run.start_position)
            self.memory.require(table, tokens[:end])
            if run.sample:
                sampled[asked.request_id] = next_token(tokens[:end])
        return sampled


class GatedWorker(WorkerService):
    """Sends a block per frame; before that of index `hold_at` it waits until the gate is opened.

    `forget`: the index of a prompt's block that is gone when it is asked for.
    """

    hold_at: int | None = None
    forget: int | None = None

    def __init__(
        self, *, incarnation: Incarnation, memory: KvMemory, paths: Sequence[Path]
    ) -> None:
        super().__init__(incarnation=incarnation, memory=memory, paths=paths)
        self.held = threading.Semaphore(0)
        self.gate = threading.Event()
        self.ended = threading.Semaphore(0)

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        if self.forget is not None:
            self.reused([BlockId(1 + self.forget)])
            self.memory.layers[0][:, 1 + self.forget] = -1.0
        one_block = self.memory.groups[0].geometry.block_bytes
        try:
            for message in super().open_fetch(replace(ask, max_frame_bytes=one_block)):
                if not isinstance(message, Header):
                    self._hold(message.segments[0].hash_index)
                yield message
        finally:
            self.ended.release()

    def _hold(self, hash_index: int) -> None:
        if hash_index == self.hold_at:
            self.held.release()
            assert self.gate.wait(60.0)


class LateWriter:
    """Moves blocks as its worker does, but its pulls hear of no cancel: they end by themselves."""

    def __init__(self, worker: WorkerService) -> None:
        self.written, self.reused = worker.written, worker.reused
        self.inventory = worker.inventory
        self._pull = worker.pull

    def pull(self, *, cancel: threading.Event, **asked: Any) -> PullOutcome:
        return self._pull(cancel=threading.Event(), **asked)


def new_worker(num_blocks: int, *, incarnation: int = 1, paths: Sequence[Path] = ()) -> GatedWorker:
    memory = KvMemory(open_device("cpu"), IDENTITY, num_blocks=num_blocks, layout=LAYOUT)
    return GatedWorker(incarnation=Incarnation(incarnation), memory=memory, paths=paths)


def fill(worker: WorkerService, tokens: Sequence[int]) -> None:
    """Write a prompt's full blocks into a worker's, from block 1 on, and declare them."""
    hashes = hash_tokens(SCHEME, tokens)
    table = [BlockId(1 + index) for index in range(len(hashes))]
    TokenMemory(worker.memory).write(table, tokens[: len(hashes) * BLOCK_TOKENS])
    worker.written(FIRST_GROUP, zip(hashes, table, strict=True))
