"""How much a decoding instance is slowed while a peer pulls blocks from it, by each path."""

import time
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvferry.cluster.bench.intertoken_peer import (
    BLOCK_TOKENS,
    MIN_BYTES_PER_S,
    Puller,
    running_puller,
)
from kvferry.cluster.bench.rows import Row, rounds, row_of_pairs
from kvferry.cluster.bench.transfer_peer import hashes_of
from kvferry.cluster.progress import Progress
from kvferry.proto.errors import TransferError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation
from kvferry.proto.layout import Layout
from kvferry.worker.device import open_device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.model.attention import PAGED_ATTENTION
from kvferry.worker.model.loading import LoadedModel
from kvferry.worker.model.runner import ModelRunner, SequenceSlice
from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.service import WorkerService

# Of the shape of a model of 135 M parameters, with 4 of its 30 layers.
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 9, 3, 64
NUM_SERVED = 64
BATCH = 8
"""Sequences that are decoded at once."""

PROMPT_TOKENS = 256
TOKENS_PER_PHASE = 100
# The first is what a peer on this host takes by itself: shared memory, where there is any.
PATHS: dict[str, tuple[Path, ...]] = {
    "intertoken_p99": ALL_PATHS,
    "intertoken_p99@bulk": ("bulk",),
    "intertoken_p99@grpc": (),
}


def measure_intertoken(seconds: float, progress: Progress) -> Iterator[Row]:
    """Yield a row for each path: p99 of the time from token to token, beside an idle worker's.

    A path by which the peer could not pull so fast has no row; `progress` is told why.

    Raises:
        UnavailableError: one of its pulls failed.
    """
    decoding = _Decoding()
    try:
        for name, paths in PATHS.items():
            try:
                with running_puller(decoding.address, decoding.worker.identity, paths) as puller:
                    pairs = [_pair(decoding, puller) for _ in rounds(seconds)]
            except TransferError as slow:
                progress(f"no row {name}: {slow}")
                continue
            yield row_of_pairs(name, pairs, "idle", unit="ms")
    finally:
        decoding.worker.stop()


def _pair(decoding: "_Decoding", puller: Puller) -> tuple[float, float]:
    idle = decoding.p99_ms()
    with puller.pulling() as pulled:
        busy = decoding.p99_ms()
    if pulled.bytes_per_s < MIN_BYTES_PER_S:
        raise TransferError(
            "the peer pulled too slowly to measure its effect",
            given=f"{pulled.bytes_per_s / 1e9:.2f} GB/s",
            allowed=f"at least {MIN_BYTES_PER_S / 1e9:.2f} GB/s",
        )
    return busy, idle


class _Decoding:
    """A model that decodes a batch, in a process that serves other blocks of its memory."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        loaded = _random_model()
        table_blocks = -(-(PROMPT_TOKENS + TOKENS_PER_PHASE) // BLOCK_TOKENS)
        num_own = BATCH * table_blocks
        memory = KvMemory(
            open_device("cpu"),
            loaded.identity,
            num_blocks=1 + num_own + NUM_SERVED,
            layout=Layout(block_tokens=BLOCK_TOKENS),
        )
        self.worker = WorkerService(incarnation=Incarnation(1), memory=memory)
        served = [BlockId(1 + num_own + index) for index in range(NUM_SERVED)]
        self.worker.written(FIRST_GROUP, zip(hashes_of(NUM_SERVED), served, strict=True))
        self.address = self.worker.serve()
        self._runner = ModelRunner(loaded, memory.layers, BLOCK_TOKENS)
        self._tables = [
            [list(range(1 + first, 1 + first + table_blocks))]
            for first in range(0, num_own, table_blocks)
        ]
        self._forward(range(PROMPT_TOKENS), 0)

    def p99_ms(self) -> float:
        """Decode `TOKENS_PER_PHASE` tokens after the prompt, and return their p99."""
        took = []
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + TOKENS_PER_PHASE):
            start = time.perf_counter()
            self._forward([7], position)
            took.append(1e3 * (time.perf_counter() - start))
        return float(np.quantile(took, 0.99))

    def _forward(self, token_ids: Any, position: int) -> None:
        self._runner.forward(
            [
                SequenceSlice(
                    token_ids=list(token_ids), start_position=position, block_tables=table
                )
                for table in self._tables
            ]
        )


def _random_model() -> LoadedModel:
    make_config: Any = LlamaConfig
    config = make_config(
        vocab_size=4096,
        hidden_size=NUM_HEADS * HEAD_SIZE,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        attn_implementation=PAGED_ATTENTION,
    )
    make_model: Any = LlamaForCausalLM
    identity = Identity(
        model="bench",
        weight_version="random",
        weight_dtype="float32",
        kv_dtype="float32",
        kv_scales="",
        rope="",
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        groups=(GroupSpec(kind="full", layers=tuple(range(NUM_LAYERS))),),
    )
    no_tokenizer: Any = None
    return LoadedModel(
        model=make_model(config).eval(),
        folder=FilePath(),
        tokenizer=no_tokenizer,
        vocab_size=config.vocab_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=(),
        identity=identity,
    )
