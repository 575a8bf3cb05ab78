"""Running the demo's conversation over a live service, and the extra prompt that is timed twice."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.cluster.demo.conversation import PromptWriter, Turn
from kvferry.cluster.demo.plan import EXTRA_MAX_TOKENS
from kvferry.cluster.progress import Progress
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.worker.model.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraTimings:
    """Times from the router to the first token of one prompt, in seconds.

    `recomputed_s`: its prefix was nowhere. `pulled_s`: its prefix was only on a peer.
    """

    pulled_s: float
    recomputed_s: float

    @property
    def ratio(self) -> float:
        """What pulling takes of what recomputing takes."""
        return self.pulled_s / self.recomputed_s


async def converse(
    router: Router,
    turns: tuple[Turn, ...],
    writer: PromptWriter,
    sampling: SamplingParams,
    progress: Progress,
) -> tuple[Served, ...]:
    """Serve all sessions at once, the turns of each in order; return the results by request.

    The first session's first token comes before the others start, as with a document that has
    just been opened: otherwise every session would prefill the same document at the same moment.
    """
    sessions: dict[int, list[Turn]] = {}
    for turn in turns:
        sessions.setdefault(turn.session, []).append(turn)
    opened = asyncio.Event()
    results: dict[str, Served] = {}

    async def run_session(number: int) -> None:
        if number != 0:
            await opened.wait()
        prompt: tuple[int, ...] = ()
        answer: tuple[int, ...] = ()
        for turn in sessions[number]:
            if prompt:
                prompt = writer.next_turn(prompt, answer, turn.question)
            else:
                prompt = writer.first_turn(turn.question)
            request = EngineRequest(
                request_id=RequestId(turn.request_id), prompt_token_ids=prompt, sampling=sampling
            )
            served = await _serve(router, request, on_token=opened.set)
            results[turn.request_id] = served
            answer = served.output_token_ids
            progress(_line(served, len(results), len(turns)))

    failures: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            for number in sessions:
                group.create_task(run_session(number))
    except* KvferryError as errors:
        failures.extend(errors.exceptions)
    if failures:
        raise failures[0]
    return tuple(results[turn.request_id] for turn in turns)


async def time_extra_prompt(
    router: Router, writer: PromptWriter, instances: Mapping[InstanceId, str], progress: Progress
) -> ExtraTimings | None:
    """Serve a prompt where nobody holds it, then elsewhere, where only the first place holds it.

    Args:
        router: the router.
        writer: makes the prompt.
        instances: role of each live instance.
        progress: is told in one line each.

    Returns None when too few instances are left alive to have a peer.
    """
    second = next((i for i, role in instances.items() if role == "decode"), None)
    first = next((i for i in reversed(list(instances)) if i != second), None)
    if first is None or second is None:
        progress("extra prompt not timed: no two instances are left alive")
        return None
    served = []
    for name, place in (("recomputed", first), ("pulled", second)):
        request = EngineRequest(
            request_id=RequestId(f"extra-{name}"),
            prompt_token_ids=writer.extra_prompt(0),
            sampling=SamplingParams(max_tokens=EXTRA_MAX_TOKENS),
        )
        one = await router.serve(request, route=Route(decode=place, prefill=None))
        progress(f"extra prompt {name} on {place}: first token after {one.ttft_s:.2f} s")
        served.append(one)
    return ExtraTimings(recomputed_s=served[0].ttft_s, pulled_s=served[1].ttft_s)


async def _serve(router: Router, request: EngineRequest, *, on_token: Callable[[], None]) -> Served:
    served: Served | None = None
    async for event in router.stream(request):
        on_token()
        if isinstance(event, Served):
            served = event
    assert served is not None
    return served


def _line(served: Served, done: int, total: int) -> str:
    accounting = served.accounting
    via = f"{served.prefill_instance} → " if served.prefill_instance else ""
    return (
        f"[{done}/{total}] {served.request.request_id} {via}{served.decode_instance}: "
        f"{accounting.prompt_tokens} prompt tokens = {accounting.local_hit_tokens} local + "
        f"{accounting.remote_hit_tokens} remote + {accounting.computed_tokens} computed, "
        f"{len(served.output_token_ids)} out, first after {served.ttft_s:.2f} s"
    )
