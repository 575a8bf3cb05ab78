"""Requests that share prefixes, some given up half-way, and what must come of each."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.router import Router
from kvferry.cluster.serving.router import Served as ServedRequest
from kvferry.cluster.sim.content import VOCABULARY, KnownContent, answer_of
from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.ids import RequestId
from kvferry.worker.model.sampling import SamplingParams

GIVEN_UP = 0.2
PATIENCE_S = 0.05
"""So long those wait who give up, about: some while their blocks are on the way."""

SALTED = 0.2


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """How requests ended. `in_flight` have not."""

    num_right: int = 0
    num_given_up: int = 0
    failures: list[str] = field(default_factory=list)
    in_flight: set[RequestId] = field(default_factory=set)
    remote_hit_tokens: int = 0


class Workload:
    """Sends requests until it is told to stop.

    Args:
        random: what is asked for, and when.
        known: learns what the blocks of each request must hold.
        max_model_len: prompt and answer together, in tokens.
        block_tokens: of the largest blocks; prompts share whole ones.
        pause_s: between two requests, about.
        violated: hears of answers that are wrong, and of what else no request may end with.
    """

    def __init__(
        self,
        random: Random,
        known: KnownContent,
        *,
        max_model_len: int,
        block_tokens: int,
        pause_s: float,
        violated: Callable[[Exception], None],
    ) -> None:
        self.outcomes = Outcomes()
        self.is_over = False
        self._random = random
        self._known = known
        self._max_model_len = max_model_len
        self._pause_s = pause_s
        self._violated = violated
        self._num_sent = 0
        longest = max_model_len // 2
        self._prefixes = [
            tokens_of(random, random.randrange(block_tokens, longest)) for _ in range(4)
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, present: Callable[[], tuple[Router, str]]) -> None:
        """Send requests, and return when all have ended after `is_over` was set.

        Args:
            present: returns the router that takes them now, and the weights of its model.
        """
        while not self.is_over:
            task = asyncio.create_task(self._one(*present(), self._next()))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(self._random.expovariate(1.0 / self._pause_s))
        while self._tasks:
            await asyncio.sleep(self._pause_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # Nobody awaits it: what it raised would be lost with it.
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._violated(error)

    def _next(self) -> EngineRequest:
        random = self._random
        self._num_sent += 1
        prefix = random.choice(self._prefixes)
        tokens = prefix[: random.randrange(1, len(prefix) + 1)]
        room = self._max_model_len - len(tokens)
        max_tokens = random.randrange(1, min(10, room))
        tokens += tokens_of(self._random, random.randrange(0, max(1, (room - max_tokens) // 2)))
        keys = RequestKeys(salt="s") if random.random() < SALTED else RequestKeys()
        return EngineRequest(
            request_id=RequestId(f"r{self._num_sent}"),
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            keys=keys,
        )

    async def _one(self, router: Router, weights: str, request: EngineRequest) -> None:
        outcomes, max_tokens = self.outcomes, request.sampling.max_tokens
        answer = answer_of(request.prompt_token_ids, request.keys, weights, max_tokens)
        self._known.learn([*request.prompt_token_ids, *answer], request.keys, weights)
        outcomes.in_flight.add(request.request_id)
        gives_up_s = (
            self._random.expovariate(1.0 / PATIENCE_S) if self._random.random() < GIVEN_UP else None
        )
        try:
            async with asyncio.timeout(gives_up_s):
                served = await router.serve(request)
        except KvferryError as error:  # first: a `DeadlineError` is a `TimeoutError`, too
            if isinstance(error, InvariantError):
                raise
            outcomes.failures.append(f"{request.request_id}: {type(error).__name__}: {error}")
        except TimeoutError:
            outcomes.num_given_up += 1
        else:
            _require_right(served, answer)
            outcomes.num_right += 1
            outcomes.remote_hit_tokens += served.accounting.remote_hit_tokens
        finally:
            outcomes.in_flight.discard(request.request_id)


def tokens_of(random: Random, count: int) -> tuple[int, ...]:
    """Return so many tokens."""
    return tuple(random.randrange(VOCABULARY) for _ in range(count))


def _require_right(served: ServedRequest, answer: tuple[int, ...]) -> None:
    if served.output_token_ids != answer:
        raise InvariantError(
            f"the answer to {served.request.request_id} is wrong",
            given=served.output_token_ids,
            allowed=answer,
        )
    parts = served.accounting
    if not parts.adds_up:
        raise InvariantError(
            f"{served.request.request_id}: prompt = local + remote + computed",
            given=str(parts),
            allowed=parts.prompt_tokens,
        )
