"""Processes that play the ranks of an instance, and how a test speaks to them."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvferry.proto.errors import KvferryError
from kvferry.proto.layout import Layout
from kvferry.worker.model.loading import load_model
from kvferry.worker.model.runner import SequenceSlice
from kvferry.worker.model.sharded_group import MeetingPoint, RankGroup
from kvferry.worker.model.sharded_runner import ShardedRunner

HOST = "127.0.0.1"
NUM_BLOCKS = 24
ANSWER_TIMEOUT_S = 60.0
START_TIMEOUT_S = 240.0
"""Four processes import torch at once, perhaps for the first time on this machine."""


class RankProcess:
    """One process; a call of its `_Rank` is sent with `ask`, and answered in `answer`."""

    def __init__(self, model: Path) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, model), daemon=True)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        assert self._pipe.poll(START_TIMEOUT_S), "the rank does not start"
        assert self._pipe.recv() == "ready"

    def ask(self, name: str, *arguments: Any, **settings: Any) -> None:
        self._pipe.send((name, arguments, settings))

    def answer(self) -> Any:
        """Return what a call returned, or the error of kvferry that it raised."""
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "the rank does not answer"
        return self._pipe.recv()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_TIMEOUT_S)
        self._pipe.close()


class Instance:
    """A group of such processes as one instance; its ranks' memory is new and holds NaN."""

    def __init__(
        self, processes: Sequence[RankProcess], layout: Layout, *, timeout_s: float = 20.0
    ) -> None:
        self.layout = layout
        self.ranks = list(processes[: layout.num_ranks])
        self.ranks[0].ask("meet")
        address = self.ranks[0].answer()
        for rank, process in enumerate(self.ranks):
            process.ask("join", layout, rank=rank, address=address, timeout_s=timeout_s)
        assert [process.answer() for process in self.ranks] == [None] * layout.num_ranks

    def all_answers(self, name: str, *arguments: Any) -> list[Any]:
        for process in self.ranks:
            process.ask(name, *arguments)
        return [process.answer() for process in self.ranks]

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        first, *others = self.all_answers("forward", batch)
        assert others == [None] * (len(self.ranks) - 1)
        return torch.tensor(first)


@contextmanager
def rank_processes(model: Path, count: int) -> Iterator[list[RankProcess]]:
    processes = [RankProcess(model) for _ in range(count)]
    try:
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.stop()


class _Rank:
    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        self._loaded = load_model(str(model))

    def meet(self) -> str:
        self._meeting = MeetingPoint(HOST)
        return self._meeting.address

    def join(self, layout: Layout, *, rank: int, address: str, timeout_s: float) -> None:
        loaded = self._loaded
        shape = (2, NUM_BLOCKS, layout.block_tokens, loaded.num_kv_heads, loaded.head_size)
        self._layers = [torch.full(shape, float("nan")) for _ in range(loaded.num_layers)]
        group = RankGroup(
            "decode-0",
            layout,
            rank=rank,
            meeting_address=address,
            host=HOST,
            timeout_s=timeout_s,
        )
        self._group = group
        self._runner = ShardedRunner(loaded, self._layers, group)

    def leave(self) -> None:
        self._group.close()

    def forward(self, batch: Sequence[SequenceSlice]) -> list[list[float]] | None:
        logits = self._runner.forward(batch)
        return None if logits is None else logits.tolist()

    def written(self) -> list[int]:
        """Return the slots that hold a token, the same in every layer."""
        slots: list[list[int]] = [
            (~part.isnan().any(dim=(2, 3))).flatten().nonzero()[:, 0].tolist()
            for layer in self._layers
            for part in layer
        ]
        assert all(other == slots[0] for other in slots)
        return slots[0]


def _serve(pipe: Connection, model: Path) -> None:
    rank = _Rank(model)
    pipe.send("ready")
    while True:
        try:
            name, arguments, settings = pipe.recv()
        except EOFError:
            return
        call: Callable[..., Any] = getattr(rank, name)
        try:
            pipe.send(call(*arguments, **settings))
        except KvferryError as error:
            pipe.send(error)
