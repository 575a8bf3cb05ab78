"""An instance of several ranks, each a process, computes what plain transformers does."""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.integration.sharded_rank import Instance, RankProcess, rank_processes

from kvferry.proto.errors import BadInputError, UnavailableError
from kvferry.proto.layout import Layout, grid
from kvferry.proto.layout_text import layout_text
from kvferry.proto.slot_mapping import slots
from kvferry.worker.model.reference import TransformersReference
from kvferry.worker.model.runner import SequenceSlice

BLOCK_TOKENS = 16
OUTPUT_TOKENS = 6
PROMPTS = [
    [(7 * index + 3) % 200 + 1 for index in range(75)],
    [9],
    [(11 * index + 5) % 190 + 1 for index in range(34)],
]
# How many tokens of each prompt are computed in one pass after another; 0: not in the pass.
CHUNKS = [[20, 1, 54], [0, 1, 0], [17, 16, 1]]
TABLES = [[3, 9, 1, 17, 22, 23], [14, 2], [5, 11, 8]]
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> TransformersReference:
    torch.set_num_threads(1)
    return TransformersReference(str(tiny_model))


@pytest.fixture(scope="module")
def expected(reference: TransformersReference) -> list[list[int]]:
    return [reference.generate(prompt, OUTPUT_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def processes(tiny_model: Path) -> Iterator[list[RankProcess]]:
    with rank_processes(tiny_model, 4) as started:
        yield started


def piece_of(tokens: Sequence[int], start: int, end: int, table: Sequence[int]) -> SequenceSlice:
    return SequenceSlice(token_ids=tokens[start:end], start_position=start, block_tables=[table])


def assert_logits(
    reference: TransformersReference, ours: torch.Tensor, tokens: Sequence[int]
) -> None:
    theirs = reference.logits(tokens, [0])[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "layout",
    [
        grid(block_tokens=BLOCK_TOKENS, pcp=pcp, dcp=dcp, interleave=interleave)
        for pcp, dcp in [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)]
        for interleave in (1, 4, 16)
    ],
    ids=layout_text,
)
def test_chunked_prefill_and_decoding_in_batches_give_the_logits_of_plain_transformers(
    processes: list[RankProcess],
    reference: TransformersReference,
    expected: list[list[int]],
    layout: Layout,
) -> None:
    instance = Instance(processes, layout)
    known = [list(prompt) for prompt in PROMPTS]
    done = [0] * len(PROMPTS)
    steps = [*zip(*CHUNKS, strict=True), *[(1,) * len(PROMPTS)] * (OUTPUT_TOKENS - 1)]
    for counts in steps:
        running = [index for index, count in enumerate(counts) if count]
        ends = [done[index] + counts[index] for index in running]
        logits = instance.forward(
            [
                piece_of(known[index], done[index], end, TABLES[index])
                for index, end in zip(running, ends, strict=True)
            ]
        )
        assert len(logits) == len(running)
        for index, end, row in zip(running, ends, logits, strict=True):
            assert_logits(reference, row, known[index][:end])
            done[index] = end
            if end == len(known[index]):
                known[index].append(int(row.argmax()))
    # The second prompt is short: it starts to decode before the others.
    outputs = [tokens[len(prompt) :] for tokens, prompt in zip(known, PROMPTS, strict=True)]
    assert outputs == expected


@pytest.mark.parametrize(("pcp", "dcp"), [(1, 2), (2, 2)])
def test_each_token_is_kept_by_the_rank_that_owns_it_and_by_no_other(
    processes: list[RankProcess], pcp: int, dcp: int
) -> None:
    layout = grid(block_tokens=BLOCK_TOKENS, pcp=pcp, dcp=dcp, interleave=4)
    instance = Instance(processes, layout)
    tokens = PROMPTS[0][:41]
    instance.forward([piece_of(tokens, 0, 30, TABLES[0])])
    instance.forward([piece_of(tokens, 30, 41, TABLES[0])])
    written = instance.all_answers("written")
    for rank, found in enumerate(written):
        own = slots(TABLES[0], 0, 41, BLOCK_TOKENS, rank=rank, num_shards=pcp * dcp, interleave=4)
        assert found == sorted(own[own >= 0].tolist())
    assert sum(map(len, written)) == 41


def test_a_prefix_may_be_written_in_the_very_pass_that_another_sequence_reads_it(
    processes: list[RankProcess], reference: TransformersReference
) -> None:
    instance = Instance(processes, grid(block_tokens=BLOCK_TOKENS, pcp=2, dcp=2))
    prefix, rest = PROMPTS[0][:64], [50, 51]
    logits = instance.forward(
        [
            piece_of([*prefix, *rest], 64, 66, [7, 2]),
            piece_of(prefix, 0, 64, [7]),
        ]
    )
    assert_logits(reference, logits[0], [*prefix, *rest])
    assert_logits(reference, logits[1], prefix)


def test_what_is_refused_is_refused_by_all_ranks_and_the_group_goes_on(
    processes: list[RankProcess], reference: TransformersReference
) -> None:
    instance = Instance(processes, grid(block_tokens=BLOCK_TOKENS, pcp=2))
    answers = instance.all_answers("forward", [piece_of([1] * 33, 0, 33, [4])])
    assert [type(answer) for answer in answers] == [BadInputError] * 2
    said = "too short for the slice; given: 33 tokens; allowed: up to 32 in 1 blocks"
    assert all(said in str(answer) for answer in answers)
    logits = instance.forward([piece_of([5, 6], 0, 2, [4])])
    assert_logits(reference, logits[0], [5, 6])


def ask_the_others(instance: Instance, absent: int) -> list[object]:
    """Start a pass without one rank, and return what the others answer in time."""
    others = [process for rank, process in enumerate(instance.ranks) if rank != absent]
    started = time.monotonic()
    for process in others:
        process.ask("forward", [piece_of(PROMPTS[2], 0, 20, TABLES[2])])
    answers = [process.answer() for process in others]
    # A rank may begin to wait for another one that has itself waited for the absent one.
    assert time.monotonic() - started < 2 * TIMEOUT_S + 1
    return answers


def assert_named(answers: Sequence[object]) -> None:
    for answer in answers:
        assert isinstance(answer, UnavailableError)
        assert answer.given["group"] == "decode-0"
        assert answer.given["ranks"] == len(answers) + 1


def test_a_rank_that_does_not_answer_ends_the_group_within_the_timeout_and_a_new_one_works(
    processes: list[RankProcess], reference: TransformersReference
) -> None:
    layout = grid(block_tokens=BLOCK_TOKENS, pcp=2, dcp=2)
    instance = Instance(processes, layout, timeout_s=TIMEOUT_S)
    processes[2].send_signal(signal.SIGSTOP)
    try:
        assert_named(ask_the_others(instance, absent=2))
    finally:
        processes[2].send_signal(signal.SIGCONT)
    started = time.monotonic()
    over = ask_the_others(instance, absent=2)
    assert time.monotonic() - started < TIMEOUT_S
    assert all("the group of ranks is over" in str(answer) for answer in over)
    logits = Instance(processes, layout).forward([piece_of([5, 6], 0, 2, [4])])
    assert_logits(reference, logits[0], [5, 6])


def test_a_rank_that_leaves_ends_the_calls_of_the_others_long_before_their_timeout(
    processes: list[RankProcess],
) -> None:
    layout = grid(block_tokens=BLOCK_TOKENS, pcp=2, dcp=2)
    instance = Instance(processes, layout, timeout_s=30 * TIMEOUT_S)
    processes[1].ask("leave")
    assert processes[1].answer() is None
    assert_named(ask_the_others(instance, absent=1))


def test_a_killed_rank_gives_an_error_in_all_others(
    tiny_model: Path, processes: list[RankProcess]
) -> None:
    instance = Instance(
        processes, grid(block_tokens=BLOCK_TOKENS, pcp=2, dcp=2), timeout_s=TIMEOUT_S
    )
    processes[3].stop()
    try:
        assert_named(ask_the_others(instance, absent=3))
    finally:
        processes[3] = RankProcess(tiny_model)
        processes[3].wait_ready()


def test_a_rank_that_never_comes_is_noticed_by_the_one_that_waits(
    processes: list[RankProcess],
) -> None:
    first = processes[0]
    first.ask("meet")
    address = first.answer()
    layout = grid(block_tokens=BLOCK_TOKENS, dcp=2)
    started = time.monotonic()
    first.ask("join", layout, rank=0, address=address, timeout_s=TIMEOUT_S)
    answer = first.answer()
    assert time.monotonic() - started < 2 * TIMEOUT_S
    assert_named([answer])
