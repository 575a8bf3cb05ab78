"""Whatever way tokens reach the paged cache, the logits are those of plain transformers."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError, ConfigError, PromptTooLongError, TokenError
from kvferry.worker.model.loading import LoadedModel, load_model
from kvferry.worker.model.reference import TransformersReference
from kvferry.worker.model.runner import ModelRunner, SequenceSlice

BLOCK_TOKENS = 4
NUM_BLOCKS = 24
KINDS = ("llama", "qwen2", "qwen3", "gemma3_text")
TOLERANCE = 1e-4

Models = dict[str, tuple[LoadedModel, TransformersReference]]


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, Path]) -> Models:
    return {
        kind: (load_model(str(folder)), TransformersReference(str(folder)))
        for kind, folder in tiny_models.items()
    }


def make_runner(loaded: LoadedModel, fill: float = float("nan")) -> ModelRunner:
    """A runner whose cache holds NaN: whatever reads a slot before it is written shows."""
    shape = (2, NUM_BLOCKS, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_size)
    layers = [torch.full(shape, fill) for _ in range(loaded.num_layers)]
    return ModelRunner(loaded, layers, BLOCK_TOKENS)


def piece_of(
    loaded: LoadedModel, token_ids: Sequence[int], start: int, table: Sequence[int]
) -> SequenceSlice:
    """A slice with one table for all groups: each layer has a tensor of its own here."""
    return SequenceSlice(
        token_ids=token_ids,
        start_position=start,
        block_tables=[table] * len(loaded.identity.groups),
    )


def last_logits(reference: TransformersReference, tokens: Sequence[int]) -> torch.Tensor:
    return reference.logits(tokens, [0])[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """1 to 4 sequences, their chunk lengths, and disjoint block tables in any order."""
    tokens = st.lists(st.integers(0, 60), min_size=1, max_size=22)
    sequences = draw(st.lists(tokens, min_size=1, max_size=4))
    chunks = []
    for sequence in sequences:
        cuts = draw(st.sets(st.integers(1, len(sequence)), max_size=4)) | {len(sequence)}
        edges = [0, *sorted(cuts)]
        chunks.append([end - start for start, end in pairwise(edges)])
    free = draw(st.permutations(range(NUM_BLOCKS)))
    placed = []
    for sequence in sequences:
        needed = -(-len(sequence) // BLOCK_TOKENS)
        placed.append(free[:needed])
        free = free[needed:]
    return sequences, chunks, placed


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(plan=plans())
def test_any_chunking_batching_and_placement_gives_the_logits_of_plain_transformers(
    models: Models, kind: str, plan: tuple[list[list[int]], list[list[int]], list[list[int]]]
) -> None:
    loaded, reference = models[kind]
    runner = make_runner(loaded)
    sequences, chunks, placed = plan
    done = [0] * len(sequences)
    while any(chunks):
        running = [index for index, left in enumerate(chunks) if left]
        batch = []
        for index in running:
            start, end = done[index], done[index] + chunks[index].pop(0)
            batch.append(piece_of(loaded, sequences[index][start:end], start, placed[index]))
            done[index] = end
        logits = runner.forward(batch)
        assert logits.shape == (len(running), 61)
        for row, index in zip(logits, running, strict=True):
            assert_close(row, last_logits(reference, sequences[index][: done[index]]))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_after_prefill_equals_generate_of_plain_transformers(
    models: Models, kind: str
) -> None:
    loaded, reference = models[kind]
    runner = make_runner(loaded)
    prompts = [[5, 9, 1, 7, 7, 3], [11], [8] * 9]
    placed = [[3, 9, 1, 17], [0, 20, 5, 6], [23, 22, 21, 10, 11]]
    outputs: list[list[int]] = [[], [], []]
    for _ in range(8):
        batch = []
        for prompt, output, table in zip(prompts, outputs, placed, strict=True):
            known = prompt + output
            start = len(known) - 1 if output else 0
            batch.append(piece_of(loaded, known[start:], start, table))
        for output, row in zip(outputs, runner.forward(batch), strict=True):
            output.append(int(row.argmax()))
    assert outputs == [reference.generate(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_blocks_of_others_does_not_change_a_sequence(
    models: Models, kind: str
) -> None:
    loaded, _ = models[kind]
    first = piece_of(loaded, list(range(6)), 0, [4, 2])
    second = piece_of(loaded, [9, 8, 7], 6, [4, 2, 8])
    results = []
    for fill in (float("nan"), 0.0, 1e30):
        runner = make_runner(loaded, fill)
        runner.forward([first])
        results.append(runner.forward([second]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_pass_writes_the_slots_of_its_tokens_and_no_other(models: Models) -> None:
    loaded, _ = models["llama"]
    shape = (2, NUM_BLOCKS, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_size)
    layers = [torch.full(shape, float("nan")) for _ in range(loaded.num_layers)]
    runner = ModelRunner(loaded, layers, BLOCK_TOKENS)
    runner.forward([piece_of(loaded, [1, 2, 3, 4, 5, 6], 0, [7, 3])])
    written = torch.zeros(NUM_BLOCKS, BLOCK_TOKENS, dtype=torch.bool)
    written[7] = True
    written[3, :2] = True
    for layer in layers:
        for part in layer:
            assert torch.equal(part.isnan().any(dim=(2, 3)), ~written)
            assert torch.equal(part.isnan().all(dim=(2, 3)), ~written)


@pytest.mark.parametrize("kind", KINDS)
def test_two_sequences_share_the_blocks_of_a_prefix(models: Models, kind: str) -> None:
    loaded, reference = models[kind]
    runner = make_runner(loaded)
    prefix = [7, 1, 4, 4, 2, 9, 30, 3]
    runner.forward([piece_of(loaded, prefix, 0, [5, 2])])
    logits = runner.forward(
        [
            piece_of(loaded, [10, 11, 12], 8, [5, 2, 6]),
            piece_of(loaded, [50], 8, [5, 2, 9]),
        ]
    )
    assert_close(logits[0], last_logits(reference, [*prefix, 10, 11, 12]))
    assert_close(logits[1], last_logits(reference, [*prefix, 50]))


def test_a_prefix_may_be_written_in_the_very_pass_that_another_sequence_reads_it(
    models: Models,
) -> None:
    loaded, reference = models["llama"]
    runner = make_runner(loaded)
    prefix = [7, 1, 4, 4]
    # The reader comes first in the pass.
    logits = runner.forward(
        [
            piece_of(loaded, [50, 51], 4, [5, 9]),
            piece_of(loaded, prefix, 0, [5]),
        ]
    )
    assert_close(logits[0], last_logits(reference, [*prefix, 50, 51]))
    assert_close(logits[1], last_logits(reference, prefix))


def test_layers_may_be_strided_views_of_one_allocation(models: Models) -> None:
    loaded, reference = models["qwen3"]
    memory = torch.full(
        (NUM_BLOCKS, loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, 2, loaded.head_size),
        float("nan"),
    )
    layers = [memory[:, index].permute(3, 0, 1, 2, 4) for index in range(loaded.num_layers)]
    runner = ModelRunner(loaded, layers, BLOCK_TOKENS)
    tokens = [3, 1, 4, 1, 5, 9, 2]
    runner.forward([piece_of(loaded, tokens[:5], 0, [8, 1])])
    logits = runner.forward([piece_of(loaded, tokens[5:], 5, [8, 1])])
    assert_close(logits[0], last_logits(reference, tokens))


def test_scores_are_scaled_by_what_the_attention_module_says(
    tiny_models: dict[str, Path],
) -> None:
    loaded = load_model(str(tiny_models["llama"]))
    reference = TransformersReference(str(tiny_models["llama"]))
    for model in (loaded.model, reference._model):
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.9
    runner = make_runner(loaded)
    tokens = [3, 1, 4, 1, 5]
    for start, end in ((0, 2), (2, 4), (4, 5)):
        piece = piece_of(loaded, tokens[start:end], start, [6, 2])
        assert_close(runner.forward([piece])[0], last_logits(reference, tokens[:end]))


GOOD = SequenceSlice(token_ids=[1, 2, 3, 4, 5], start_position=0, block_tables=[[1, 2]])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"token_ids": []}, BadInputError, "tokens=0"),
        ({"start_position": -1}, BadInputError, "start_position=-1"),
        ({"token_ids": [60, 61]}, TokenError, "given: 61; allowed: 0 to 60"),
        ({"token_ids": [3, -1]}, TokenError, "given: -1; allowed: 0 to 60"),
        ({"block_tables": [[1]]}, BadInputError, "given: 5 tokens; allowed: up to 4 in 1 blocks"),
        ({"block_tables": [[1, 24]]}, BadInputError, r"given: \[1, 24\]; allowed: 0 to 23"),
        ({"block_tables": [[-1, 2]]}, BadInputError, r"given: \[-1, 2\]; allowed: 0 to 23"),
        ({"block_tables": [[1, 2]] * 2}, BadInputError, "per group .* given: 2; allowed: 1"),
        (
            {"start_position": 60, "block_tables": [list(range(20))]},
            PromptTooLongError,
            "given: 65; allowed: up to 64",
        ),
    ],
)
def test_a_slice_that_cannot_run_is_refused_with_what_was_given_and_what_is_allowed(
    models: Models, changes: dict[str, object], error: type[Exception], said: str
) -> None:
    runner = make_runner(models["llama"][0])
    piece: SequenceSlice = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=said):
        runner.forward([GOOD, piece])


def test_an_empty_batch_is_refused(models: Models) -> None:
    with pytest.raises(BadInputError, match="at least one slice"):
        make_runner(models["llama"][0]).forward([])


@pytest.mark.parametrize(
    ("num_layers", "shape", "dtype", "said"),
    [
        (1, (2, 8, 4, 2, 8), torch.float32, "one KV tensor per layer is needed; given: 1"),
        (2, (2, 8, 4, 4, 8), torch.float32, "layer 0 does not fit the model"),
        (2, (2, 8, 5, 2, 8), torch.float32, "layer 0 does not fit the model"),
        (2, (2, 8, 4, 2, 8), torch.bfloat16, "torch.bfloat16.*allowed.*torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    models: Models, num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, said: str
) -> None:
    layers = [torch.zeros(shape, dtype=dtype) for _ in range(num_layers)]
    with pytest.raises(ConfigError, match=said):
        ModelRunner(models["llama"][0], layers, 4)


def test_tensors_on_another_device_than_the_model_are_refused(models: Models) -> None:
    layers = [torch.zeros(2, 8, 4, 2, 8, device="meta") for _ in range(2)]
    with pytest.raises(ConfigError, match=r"given: .*meta.*allowed: .*cpu"):
        ModelRunner(models["llama"][0], layers, 4)
