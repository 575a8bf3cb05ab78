"""Layers with a window beside layers without: as plain transformers, from the window's blocks."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import HYBRID_WINDOW_TOKENS
from tests.unit.model.conftest import MakeModel

from kvferry.proto.errors import BadInputError
from kvferry.worker.model.loading import LoadedModel, load_model
from kvferry.worker.model.reference import TransformersReference
from kvferry.worker.model.runner import ModelRunner, SequenceSlice

BLOCK_TOKENS = 16
NUM_BLOCKS = 112
NULL_BLOCK = 0
TOLERANCE = 1e-3
# More than four windows, so that blocks are given back again and again.
NUM_PROMPT_TOKENS = 170
PROMPTS = [
    [(factor * index + index * index // 7) % 256 + 1 for index in range(NUM_PROMPT_TOKENS)]
    for factor in (37, 101, 5)
]


class Request:
    """A sequence, how much of it has been computed, and its blocks in each of the groups."""

    def __init__(self, tokens: Sequence[int], num_groups: int) -> None:
        self.tokens = list(tokens)
        self.num_computed = 0
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_given_back = [0] * num_groups


class Cache:
    """Blocks as a coordinator hands them out: one pool, whose ids any group may get.

    Tensor `k` is that of the k-th layer of every group. What was never written is NaN. A block that
    has left the window becomes NaN and goes back to the pool, which hands it out next; its place in
    the table gets the null block's id, or with `stale_tables` keeps its own.
    """

    def __init__(self, loaded: LoadedModel, *, stale_tables: bool = False) -> None:
        self.groups = loaded.identity.groups
        shape = (2, NUM_BLOCKS, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_size)
        num_tensors = max(len(group.layers) for group in self.groups)
        self.tensors = [torch.full(shape, float("nan")) for _ in range(num_tensors)]
        tensor_of = {
            layer: self.tensors[index]
            for group in self.groups
            for index, layer in enumerate(group.layers)
        }
        layers = [tensor_of[layer] for layer in range(loaded.num_layers)]
        self.runner = ModelRunner(loaded, layers, BLOCK_TOKENS)
        self.free = list(range(NULL_BLOCK + 1, NUM_BLOCKS))
        self.stale_tables = stale_tables

    def request(self, tokens: Sequence[int]) -> Request:
        return Request(tokens, len(self.groups))

    def forward(self, work: Sequence[tuple[Request, int]]) -> torch.Tensor:
        """Compute so many further tokens of each request; returns the logits of each one's last."""
        batch = []
        for request, num_tokens in work:
            self._leave_windows(request)
            start, end = request.num_computed, request.num_computed + num_tokens
            for table in request.tables:
                while len(table) * BLOCK_TOKENS < end:
                    table.append(self.free.pop())
            batch.append(
                SequenceSlice(
                    token_ids=request.tokens[start:end],
                    start_position=start,
                    block_tables=request.tables,
                )
            )
            request.num_computed = end
        return self.runner.forward(batch)

    def num_held(self, request: Request) -> list[int]:
        """Blocks in use per group."""
        return [
            len(table) - given_back
            for table, given_back in zip(request.tables, request.num_given_back, strict=True)
        ]

    def _leave_windows(self, request: Request) -> None:
        for group_id, group in enumerate(self.groups):
            if group.window_tokens is None:
                continue
            table = request.tables[group_id]
            num_skipped = max(0, request.num_computed - group.window_tokens + 1) // BLOCK_TOKENS
            for index in range(request.num_given_back[group_id], num_skipped):
                for tensor in self.tensors:
                    tensor[:, table[index]] = float("nan")
                self.free.append(table[index])
                if not self.stale_tables:
                    table[index] = NULL_BLOCK
            request.num_given_back[group_id] = num_skipped


@pytest.fixture(scope="module")
def loaded(tiny_hybrid_model: Path) -> LoadedModel:
    return load_model(str(tiny_hybrid_model))


@pytest.fixture(scope="module")
def reference(tiny_hybrid_model: Path) -> TransformersReference:
    return TransformersReference(str(tiny_hybrid_model))


@pytest.fixture(scope="module")
def logits_of_prefixes(reference: TransformersReference) -> list[torch.Tensor]:
    """Row `n - 1` of a prompt's entry: what plain transformers says after its first n tokens."""
    return [reference.logits(prompt[:1], [*prompt[1:], 0]) for prompt in PROMPTS]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def generate(cache: Cache, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[int]]:
    """Greedy decoding in one batch; a prompt is computed in chunks of 50 while others decode."""
    requests = [cache.request(prompt) for prompt in prompts]
    wanted = [len(prompt) + num_outputs for prompt in prompts]
    while True:
        running = [
            request
            for request, tokens in zip(requests, wanted, strict=True)
            if len(request.tokens) < tokens
        ]
        if not running:
            break
        work = [(item, min(50, len(item.tokens) - item.num_computed)) for item in running]
        for item, row in zip(running, cache.forward(work), strict=True):
            if item.num_computed == len(item.tokens):
                item.tokens.append(int(row.argmax()))
    return [item.tokens[-num_outputs:] for item in requests]


@pytest.mark.parametrize("stale_tables", [False, True])
def test_a_prompt_of_several_windows_may_be_cut_anywhere(
    loaded: LoadedModel, logits_of_prefixes: list[torch.Tensor], stale_tables: bool
) -> None:
    assert NUM_PROMPT_TOKENS > 4 * HYBRID_WINDOW_TOKENS
    for cut in range(1, NUM_PROMPT_TOKENS):
        cache = Cache(loaded, stale_tables=stale_tables)
        request = cache.request(PROMPTS[0])
        for num_tokens in (cut, NUM_PROMPT_TOKENS - cut):
            logits = cache.forward([(request, num_tokens)])
            assert_close(logits[0], logits_of_prefixes[0][request.num_computed - 1])


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.lists(
        st.sets(st.integers(1, NUM_PROMPT_TOKENS - 1), max_size=8),
        min_size=len(PROMPTS),
        max_size=len(PROMPTS),
    ),
    stale_tables=st.booleans(),
)
def test_prompts_in_one_batch_may_be_cut_differently_and_take_over_each_others_blocks(
    loaded: LoadedModel,
    logits_of_prefixes: list[torch.Tensor],
    cuts: list[set[int]],
    stale_tables: bool,
) -> None:
    cache = Cache(loaded, stale_tables=stale_tables)
    requests = [cache.request(prompt) for prompt in PROMPTS]
    chunks = [
        [end - start for start, end in pairwise([0, *sorted(places), NUM_PROMPT_TOKENS])]
        for places in cuts
    ]
    while any(chunks):
        running = [index for index, left in enumerate(chunks) if left]
        logits = cache.forward([(requests[index], chunks[index].pop(0)) for index in running])
        for row, index in zip(logits, running, strict=True):
            assert_close(row, logits_of_prefixes[index][requests[index].num_computed - 1])


@pytest.mark.parametrize("stale_tables", [False, True])
def test_greedy_texts_of_a_batch_equal_those_of_plain_transformers(
    loaded: LoadedModel, reference: TransformersReference, stale_tables: bool
) -> None:
    prompts = [PROMPTS[0], PROMPTS[1][:3], PROMPTS[2][:90]]
    num_outputs = 2 * HYBRID_WINDOW_TOKENS
    outputs = generate(Cache(loaded, stale_tables=stale_tables), prompts, num_outputs)
    assert outputs == [reference.generate(prompt, num_outputs) for prompt in prompts]
    verdicts = [reference.compare(*pair) for pair in zip(prompts, outputs, strict=True)]
    assert [(verdict.equal, verdict.near_ties) for verdict in verdicts] == [(True, 0)] * 3
    assert min(verdict.min_gap for verdict in verdicts) > TOLERANCE
    # Texts that repeat one token would be equal also where much is wrong.
    assert min(len(set(output)) for output in outputs) > 20


def test_a_group_with_a_window_keeps_the_blocks_of_its_window_only(loaded: LoadedModel) -> None:
    cache = Cache(loaded)
    request = cache.request(PROMPTS[0])
    cache.forward([(request, 160)])
    assert cache.num_held(request) == [10, 10, 10]
    cache.forward([(request, 1)])
    # Token 160 sees positions 121 to 160, in blocks 7 to 10.
    assert cache.num_held(request) == [4, 4, 11]
    assert request.tables[0][:8] == [NULL_BLOCK] * 7 + [request.tables[0][7]]


def test_what_lies_before_the_window_changes_no_bit(loaded: LoadedModel) -> None:
    results = []
    for filled in (float("nan"), 0.0, 1e30):
        cache = Cache(loaded)
        request = cache.request(PROMPTS[0])
        cache.forward([(request, 130)])
        for tensor in cache.tensors:
            for table in request.tables[:2]:
                # Slots up to position 90; token 130 sees those from 91 on.
                tensor[:, table[:5]] = filled
                tensor[:, table[5], : 91 % BLOCK_TOKENS] = filled
        results.append(cache.forward([(request, 1)]))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_table_must_name_blocks_from_the_window_on_and_may_name_anything_before(
    loaded: LoadedModel,
) -> None:
    cache = Cache(loaded)
    request = cache.request(PROMPTS[0])
    cache.forward([(request, 130)])
    *windows, full = request.tables
    far = [-1] * 5
    good = [*(far + table[5:] for table in windows), full]

    def run(tables: list[list[int]]) -> torch.Tensor:
        piece = SequenceSlice(
            token_ids=PROMPTS[0][130:140], start_position=130, block_tables=tables
        )
        return cache.runner.forward([piece])

    assert torch.isfinite(run(good)).all()
    with pytest.raises(BadInputError, match=r"table of group 1 names .*given: \[-1, "):
        run([good[0], [*far, -1, *good[1][6:]], full])
    with pytest.raises(BadInputError, match="table of group 2 names"):
        run([*good[:2], far + full[5:]])
    with pytest.raises(BadInputError, match=r"table of group 0 is too short .*up to 128 in 8 blo"):
        run([good[0][:8], *good[1:]])
    with pytest.raises(BadInputError, match=r"one block table per group .*given: 2; allowed: 3"):
        run(good[:2])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("window", [1, 5, 16, 60])
def test_any_window_in_models_of_any_kind_is_that_of_plain_transformers(
    make_model: MakeModel, kind: str, window: int
) -> None:
    of_kind = (
        {"layer_types": ["sliding_attention"] * 3}
        if kind == "gemma3_text"
        else {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    )
    folder = str(make_model(kind, num_hidden_layers=3, sliding_window=window, **of_kind))
    loaded, reference = load_model(folder), TransformersReference(folder)
    assert {group.window_tokens for group in loaded.identity.groups} == (
        {window} if kind == "gemma3_text" else {None, window}
    )
    prompts = [[index * index % 61 for index in range(40)], [7, 3]]
    outputs = generate(Cache(loaded), prompts, 20)
    # Not beside `generate`: with a window of 1, transformers' own cache lets all tokens be seen.
    verdicts = [reference.compare(*pair) for pair in zip(prompts, outputs, strict=True)]
    assert [(verdict.equal, verdict.near_ties) for verdict in verdicts] == [(True, 0)] * 2


@pytest.mark.parametrize("changed", [39, 41])
def test_a_window_one_off_would_show_in_the_logits(
    loaded: LoadedModel, logits_of_prefixes: list[torch.Tensor], changed: int
) -> None:
    cache = Cache(loaded)
    cache.runner._windows = [changed, changed, None]
    logits = cache.forward([(cache.request(PROMPTS[0]), 60)])
    assert (logits[0] - logits_of_prefixes[0][59]).abs().max() > 10 * TOLERANCE
