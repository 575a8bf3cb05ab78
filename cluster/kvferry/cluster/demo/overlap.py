"""What pulling chunk by chunk saves: fresh prompts, decoded beside and after their prefill."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from statistics import median

from kvferry.cluster.demo.conversation import PromptWriter
from kvferry.cluster.demo.plan import EXTRA_MAX_TOKENS
from kvferry.cluster.progress import Progress
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.worker.model.sampling import SamplingParams

NUM_PAIRS = 3

MakeRouter = Callable[[bool], AbstractAsyncContextManager[Router]]
"""Makes a router whose decode legs overlap with prefills, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """One prompt that was prefilled at one instance and decoded at another.

    Seconds: `ttft_s` from the router to the first token, `after_prefill_s` of those from the news
    that the prefill was over. `ahead_tokens` were pulled before that.
    """

    ttft_s: float
    after_prefill_s: float
    ahead_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTimings:
    """Equal prompts, of which each `overlapped` one followed its prefill, and none `in_turn`."""

    in_turn: tuple[Handover, ...]
    overlapped: tuple[Handover, ...]

    @property
    def ahead_tokens(self) -> int:
        """Fewest tokens of a prompt that were pulled before its prefill was over."""
        return min(handover.ahead_tokens for handover in self.overlapped)

    @property
    def saved_s(self) -> float:
        """Seconds by which following lets the first token come earlier after the prefill."""
        return median(
            alone.after_prefill_s - beside.after_prefill_s
            for alone, beside in zip(self.in_turn, self.overlapped, strict=True)
        )


async def time_overlap(
    make_router: MakeRouter,
    writer: PromptWriter,
    instances: Mapping[InstanceId, str],
    progress: Progress,
) -> OverlapTimings | None:
    """Serve pairs of prompts that nobody holds, in turn and overlapped, one after the other.

    Args:
        make_router: one router runs at a time.
        writer: makes the prompts.
        instances: role of each live instance.
        progress: is told in one line each.

    Returns None when no prefill or no decode instance is left alive, or one died meanwhile.
    """
    prefill = next((i for i, role in instances.items() if role == "prefill"), None)
    decode = next((i for i, role in instances.items() if role == "decode"), None)
    if prefill is None or decode is None:
        progress("overlap not timed: no prefill and decode instance are left alive")
        return None
    times: dict[bool, list[Handover]] = {False: [], True: []}
    for number in range(1, 2 * NUM_PAIRS + 1):
        overlap = number % 2 == 0
        request = EngineRequest(
            request_id=RequestId(f"fresh-{number}"),
            prompt_token_ids=writer.extra_prompt(number),
            sampling=SamplingParams(max_tokens=EXTRA_MAX_TOKENS),
        )
        async with make_router(overlap) as router:
            served = await router.serve(request, route=Route(decode=decode, prefill=prefill))
        handover = _handover(served)
        if handover is None:
            progress("overlap not timed: the prefill instance is gone")
            return None
        times[overlap].append(handover)
        progress(
            f"fresh prompt {number} {'overlapped' if overlap else 'in turn'}: first token after "
            f"{handover.ttft_s:.2f} s, {1000 * handover.after_prefill_s:.0f} ms after its prefill, "
            f"{handover.ahead_tokens} tokens pulled before"
        )
    return OverlapTimings(in_turn=tuple(times[False]), overlapped=tuple(times[True]))


def _handover(served: Served) -> Handover | None:
    if served.prefill_s is None:
        return None
    return Handover(
        ttft_s=served.ttft_s,
        after_prefill_s=served.ttft_s - served.prefill_s,
        ahead_tokens=served.ahead_tokens,
    )
