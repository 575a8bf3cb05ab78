"""The demo's real model: paged, chunked and batched, it says what plain transformers says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.worker.model.demo_model import ensure_demo_model
from kvferry.worker.model.loading import LoadedModel, load_model
from kvferry.worker.model.reference import TransformersReference
from kvferry.worker.model.runner import ModelRunner, SequenceSlice

pytestmark = pytest.mark.model

BLOCK_TOKENS = 16
NUM_BLOCKS = 24
NUM_OUTPUTS = 12
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours of the rainbow, separated by commas.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    torch.set_num_threads(1)
    return ensure_demo_model()


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    tokenizer: Any = loaded.tokenizer
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]


def generate_paged(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Prefill in chunks of 20 tokens, then decode, all prompts in one batch, greedily."""
    shape = (2, NUM_BLOCKS, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_size)
    layers = [torch.full(shape, float("nan")) for _ in range(loaded.num_layers)]
    runner = ModelRunner(loaded, layers, BLOCK_TOKENS)
    # Interleaved and descending, so that no table is a run of blocks.
    tables = [range(NUM_BLOCKS - 1 - index, -1, -len(prompts)) for index in range(len(prompts))]
    known = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(len(rows) < NUM_OUTPUTS for rows in logits):
        running = [index for index, rows in enumerate(logits) if len(rows) < NUM_OUTPUTS]
        batch = [
            SequenceSlice(
                token_ids=known[index][done[index] : done[index] + 20],
                start_position=done[index],
                block_tables=[tables[index]],
            )
            for index in running
        ]
        for index, row, piece in zip(running, runner.forward(batch), batch, strict=True):
            done[index] = piece.end_position
            if done[index] == len(known[index]):
                logits[index].append(row)
                known[index].append(int(row.argmax()))
    outputs = [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
    return outputs, [torch.stack(rows) for rows in logits]


def test_greedy_text_and_logits_equal_those_of_plain_transformers(
    folder: Path, loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    outputs, logits = generate_paged(loaded, prompts)
    reference = TransformersReference(str(folder))
    for prompt, output, rows in zip(prompts, outputs, logits, strict=True):
        assert output == reference.generate(prompt, NUM_OUTPUTS)
        torch.testing.assert_close(rows, reference.logits(prompt, output), atol=1e-3, rtol=0)
    verdicts = [reference.compare(*pair) for pair in zip(prompts, outputs, strict=True)]
    assert [(verdict.equal, verdict.near_ties) for verdict in verdicts] == [(True, 0)] * 3
    assert "Paris" in loaded.tokenizer.decode(outputs[0])


def test_the_converted_model_is_the_one_its_card_describes(loaded: LoadedModel) -> None:
    assert loaded.model.dtype == torch.float32
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_size) == (30, 3, 64)
    assert (loaded.vocab_size, loaded.max_model_len) == (49152, 8192)
    assert loaded.eos_token_ids == (loaded.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
