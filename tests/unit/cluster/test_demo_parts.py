"""The demo's prompts, its plan and its report."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import make_identity
from transformers import AutoTokenizer

from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.demo.conversation import PromptWriter, plan_turns
from kvferry.cluster.demo.overlap import Handover, OverlapTimings
from kvferry.cluster.demo.plan import (
    longest_requests,
    min_num_blocks,
    require_all_fit,
    require_memory,
)
from kvferry.cluster.demo.report import DemoResult, summary
from kvferry.cluster.demo.serve import ExtraTimings
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.serving.pool_size import KvSize
from kvferry.cluster.serving.requests import Accounting, EngineRequest
from kvferry.cluster.serving.router import Served
from kvferry.proto.errors import ConfigError, ModelError, NeverFitsError
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.specs import FullSpec
from kvferry.worker.model.reference import Comparison
from kvferry.worker.model.sampling import SamplingParams

EOS = 0
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(params=["plain", "chat"])
def writer(request: pytest.FixtureRequest, tiny_model: Path) -> PromptWriter:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE if request.param == "chat" else None
    return PromptWriter(tokenizer, (EOS,))


def test_requests_are_dealt_over_three_sessions() -> None:
    turns = plan_turns(8)
    assert [turn.session for turn in turns] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len({turn.request_id for turn in turns}) == 8


def test_sessions_share_the_document_and_the_extra_prompt_does_not(writer: PromptWriter) -> None:
    first, second = writer.first_turn("What is this?"), writer.first_turn("Who may use it?")
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared > 1000
    extra, another = writer.extra_prompt(0), writer.extra_prompt(1)
    assert len(extra) == len(another) > 1000
    assert next(i for i, (a, b) in enumerate(zip(first, extra, strict=False)) if a != b) < 16
    assert next(i for i, (a, b) in enumerate(zip(extra, another, strict=True)) if a != b) < 16


def test_a_later_turn_begins_with_the_earlier_one_and_its_answer(writer: PromptWriter) -> None:
    prompt, answer = writer.first_turn("What is this?"), (65, 66)
    later = writer.next_turn(prompt, (*answer, EOS), "And why?")
    assert later[: len(prompt) + 2] == prompt + answer
    assert later[len(prompt) + 2] != EOS
    assert len(later) == writer.longest_next_turn(len(prompt), 2, "And why?")


def test_the_plan_knows_the_smallest_pool(writer: PromptWriter) -> None:
    def limits(num_blocks: int) -> Limits:
        return Limits(
            num_blocks=num_blocks,
            block_tokens=16,
            max_model_len=8192,
            token_budget=16,
            max_running=4,
            specs=(FullSpec(block_tokens=16, kv_heads=1, head_dim=8, dtype="float32"),),
        )

    requests = tuple(longest_requests(plan_turns(4), writer, SamplingParams(max_tokens=20)))
    needed = min_num_blocks(requests, limits(2))
    longest = max(len(r.prompt_token_ids) for r in requests) + 19
    assert needed == -(-longest // 16) + 1
    require_all_fit(requests, limits(needed))
    with pytest.raises(NeverFitsError) as refused:
        require_all_fit(requests, limits(needed - 1))
    assert refused.value.given == {"needed_blocks": needed, "have_blocks": needed - 1}


@pytest.mark.parametrize(
    ("fits", "too_much", "allowed"),
    [
        (KvSize(num_blocks=8), KvSize(num_blocks=9), "num_blocks <= 8, or kv_bytes <= 9009"),
        (KvSize(kv_bytes=9009), KvSize(kv_bytes=9010), "num_blocks <= 8, or kv_bytes <= 9009"),
        (
            KvSize(memory_fraction=1 / 4),
            KvSize(memory_fraction=0.26),
            "memory_fraction <= 0.25",
        ),
    ],
)
def test_pools_larger_than_this_machine_are_refused_with_the_largest_that_fit(
    fits: KvSize, too_much: KvSize, allowed: str
) -> None:
    layout = Layout(block_tokens=16, pcp=2)
    config = ServiceConfig(model="m", kv_size=fits, prefill_layout=layout)
    identity, memory_bytes = make_identity(), 4 * 9009
    assert (config.num_ranks, identity.block_bytes(16)) == (4, 1024)
    require_memory(config, identity, memory_bytes=memory_bytes)
    config = replace(config, kv_size=too_much)
    with pytest.raises(ConfigError) as refused:
        require_memory(config, identity, memory_bytes=memory_bytes)
    assert refused.value.allowed == allowed
    require_memory(replace(config, ray_address="auto"), identity, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ 1 / 0 }}", "x"]
)
def test_a_chat_template_that_fails_or_drops_answers_is_named(
    tiny_model: Path, template: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = template
    writer = PromptWriter(tokenizer, (EOS,))
    with pytest.raises(ModelError, match="chat template"):
        writer.next_turn((1,), (2,), "And why?")


def served(accounting: Accounting) -> Served:
    return Served(
        request=EngineRequest(
            request_id=RequestId("r"),
            prompt_token_ids=(1,) * accounting.prompt_tokens,
            sampling=SamplingParams(),
        ),
        output_token_ids=(5, 6),
        finish_reason="length",
        accounting=accounting,
        prefill_computed_tokens=8,
        ahead_tokens=0,
        pulled_bytes=640,
        preemptions=1,
        prefill_s=None,
        ttft_s=0.5,
        prefill_instance=None,
        decode_instance=InstanceId("d0"),
    )


def result(
    *,
    equal: bool = True,
    computed: int = 2,
    extra: ExtraTimings | None = None,
    overlap: OverlapTimings | None = None,
) -> DemoResult:
    accounting = Accounting(
        prompt_tokens=10, local_hit_tokens=0, remote_hit_tokens=8, computed_tokens=computed
    )
    return DemoResult(
        instances=(),
        metrics_address=None,
        turns=plan_turns(1),
        served=(served(accounting),),
        comparisons=(Comparison(equal=equal, near_ties=0, first_difference=None, min_gap=1.0),),
        extra=extra,
        overlap=overlap,
        min_num_blocks=4,
    )


def test_a_run_is_good_when_all_is_equal_and_every_token_accounted_for() -> None:
    assert result().ok
    assert not result(equal=False).ok
    assert not result(computed=1).ok


def test_the_summary_adds_up_and_leaves_untaken_times_open() -> None:
    assert summary(result()) == {
        "equal": 1,
        "total": 1,
        "near_ties": 0,
        "remote_hit_tokens": 8,
        "pulled_bytes": 640,
        "preemptions": 1,
        "min_num_blocks": 4,
        "ttft_pulled_s": None,
        "ttft_recomputed_s": None,
        "ttft_ratio": None,
        "ttft_in_turn_s": None,
        "after_prefill_in_turn_s": None,
        "ttft_overlapped_s": None,
        "after_prefill_overlapped_s": None,
        "overlap_ahead_tokens": None,
        "overlap_saved_s": None,
    }
    timed = summary(result(extra=ExtraTimings(pulled_s=0.5, recomputed_s=2.0)))
    assert timed["ttft_ratio"] == 0.25


def test_what_overlap_saves_is_the_median_over_pairs_of_the_time_after_the_prefill() -> None:
    def handovers(*times: tuple[float, float], ahead_tokens: int) -> tuple[Handover, ...]:
        return tuple(
            Handover(ttft_s=ttft, after_prefill_s=after, ahead_tokens=ahead_tokens - 16 * number)
            for number, (ttft, after) in enumerate(times)
        )

    overlap = OverlapTimings(
        in_turn=handovers((2.0, 0.5), (3.0, 0.4), (2.5, 0.9), ahead_tokens=0),
        overlapped=handovers((1.9, 0.2), (2.0, 0.3), (2.1, 0.4), ahead_tokens=800),
    )
    assert (
        summary(result(overlap=overlap)).items()
        >= {
            "ttft_in_turn_s": 2.5,
            "after_prefill_in_turn_s": 0.5,
            "ttft_overlapped_s": 2.0,
            "after_prefill_overlapped_s": 0.3,
            "overlap_ahead_tokens": 768,
            "overlap_saved_s": 0.3,
        }.items()
    )
