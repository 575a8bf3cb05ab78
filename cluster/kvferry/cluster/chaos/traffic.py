"""Callers who ask for answers that are known, whatever happens meanwhile."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.cluster.chaos.book import ANSWER_TOKENS, Conversation
from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router, Served
from kvferry.proto.errors import BadInputError, InvariantError, KvferryError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.ids import RequestId
from kvferry.worker.model.sampling import SamplingParams

NUM_CALLERS = 4
REQUEST_TIMEOUT_S = 90.0
LOST_AFTER_S = REQUEST_TIMEOUT_S + 30.0
"""A request that has neither ended nor failed by then never will."""

REQUESTS_PER_SALT = 60
"""So often nothing is cached of anything, and all of it has to be computed and moved again."""

GIVE_UP_CHANCE = 0.05

NOBODY_MAY_SEE = (BadInputError, InvariantError)
"""These errors blame the caller, who asks for nothing wrong, or kvferry itself."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An output that is not that of the undisturbed run."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """How requests ended.

    `failed` by error type: each attempt counts. `unclear` did not fail as one should: with an
    error that is not kvferry's, that blames the caller, or not at all within `LOST_AFTER_S`.
    """

    served: int = 0
    given_up: int = 0
    retried: int = 0
    local_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    computed_tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def __str__(self) -> str:
        failed = ", ".join(f"{name} {number}" for name, number in self.failed.items()) or "none"
        return (
            f"{self.served} served, {self.given_up} given up, {len(self.differences)} differ, "
            f"failed: {failed}"
        )

    def took(self, served: Served, expected: tuple[int, ...]) -> None:
        """Count a request that has ended, and look at what came."""
        self.served += 1
        parts = served.accounting
        self.local_hit_tokens += parts.local_hit_tokens
        self.remote_hit_tokens += parts.remote_hit_tokens
        self.computed_tokens += parts.computed_tokens
        if not parts.adds_up:
            self.unclear.append(f"{served.request.request_id}: its tokens do not add up: {parts}")
        self.compare(served.request.prompt_token_ids, served.output_token_ids, expected)

    def compare(
        self, prompt: tuple[int, ...], output: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        """Remember an output that is another one.

        No near tie explains one of another length, which is told at once.
        """
        if len(output) != len(expected):
            self.unclear.append(f"an output has {len(output)} tokens instead of {len(expected)}")
        elif output != expected:
            self.differences.append(Difference(prompt=prompt, output=output, expected=expected))


class Traffic:
    """Callers that go through conversations, turn by turn, until they are stopped.

    Args:
        router: serves.
        conversations: with their answers.
        seed: decides who asks what.
    """

    def __init__(self, router: Router, conversations: Sequence[Conversation], seed: int) -> None:
        self.tally = Tally()
        self._router = router
        self._conversations = conversations
        self._seed = seed
        self._numbers = itertools.count()
        self._is_over = False
        self._callers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Traffic":
        self._callers = [asyncio.create_task(self._call(one)) for one in range(NUM_CALLERS)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        if kind is not None:  # interrupted: nobody is interested any more
            for caller in self._callers:
                caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=kind is not None)

    async def everything(self) -> None:
        """Ask every prompt once, while nothing goes wrong: each must be answered."""

        async def read(part: Sequence[Conversation]) -> None:
            for conversation in part:
                for prompt, answer in zip(conversation.prompts, conversation.answers, strict=True):
                    if not await self._ask(prompt, answer):
                        self.tally.unclear.append("a request failed twice, after the last fault")

        parts = (self._conversations[caller::NUM_CALLERS] for caller in range(NUM_CALLERS))
        await asyncio.gather(*map(read, parts))

    async def _call(self, caller: int) -> None:
        chance = random.Random(f"caller {caller} {self._seed}")
        while not self._is_over:
            conversation = chance.choice(self._conversations)
            turns = zip(conversation.prompts, conversation.answers, strict=True)
            for prompt, answer in turns:
                if self._is_over:
                    return
                if chance.random() < GIVE_UP_CHANCE:
                    after = chance.randrange(1, ANSWER_TOKENS)
                    await self._leave_midway(prompt, answer, after=after)
                    break
                await self._ask(prompt, answer)

    async def _ask(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
        """Ask, and after a failure once more, as a person would; tell whether it was answered."""
        served = await self._counted(self._router.serve(self._request(prompt)))
        if served is None:
            self.tally.retried += 1
            served = await self._counted(self._router.serve(self._request(prompt)))
        if served is not None:
            self.tally.took(served, answer)
        return served is not None

    async def _leave_midway(
        self, prompt: tuple[int, ...], answer: tuple[int, ...], *, after: int
    ) -> None:
        tokens = await self._counted(first_tokens(self._router, self._request(prompt), after))
        if tokens is not None:
            self.tally.given_up += 1
            self.tally.compare(prompt, tokens, answer[:after])

    def _request(self, prompt: tuple[int, ...]) -> EngineRequest:
        number = next(self._numbers)
        return request(f"chaos-{number}", prompt, salt=f"{number // REQUESTS_PER_SALT}")

    async def _counted(self, asking: Coroutine[Any, Any, T]) -> T | None:
        """Return what was asked for; None after a failure, which is counted."""
        try:
            async with asyncio.timeout(LOST_AFTER_S):
                return await asking
        except TimeoutError:
            self.tally.unclear.append(f"a request did not end within {LOST_AFTER_S:g} s")
        except Exception as error:  # whatever it is, it is told
            if isinstance(error, KvferryError) and not isinstance(error, NOBODY_MAY_SEE):
                self.tally.failed[type(error).__name__] += 1
            else:
                self.tally.unclear.append(f"{type(error).__name__}: {error}")
        return None


def request(name: str, prompt: tuple[int, ...], *, salt: str) -> EngineRequest:
    """Return a request whose answer has `ANSWER_TOKENS` tokens, the most likely ones."""
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
        keys=RequestKeys(salt=salt),
    )


async def first_tokens(router: Router, asked: EngineRequest, number: int) -> tuple[int, ...]:
    """Return the first tokens of an answer and leave; errors as in `Router.serve`."""
    tokens: list[int] = []
    async with aclosing(router.stream(asked)) as events:
        async for event in events:
            if isinstance(event, Served) or len(tokens) == number:
                break
            tokens.append(event)
    return tuple(tokens)
