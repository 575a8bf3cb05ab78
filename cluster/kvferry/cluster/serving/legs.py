"""Requests on engines, as the router's event loop sees them: send, follow, notice death."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

from kvferry.cluster.ports import AsyncCoordinatorPort, EnginePort
from kvferry.cluster.serving.requests import EngineRequest, Output
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    DeadlineError,
    InstanceDiedError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.ids import Incarnation, InstanceId, RequestId
from kvferry.proto.messages import RemoveInstance, Role

log = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 10.0
"""An engine that does not take a request by then gets no others for as long, if others do."""

TELL_TIMEOUT_S = 2.0
"""A coordinator finds a death by itself, and a request that nobody wants ends by itself, so nobody
waits long until they are told."""

OUTPUTS_WAIT_S = 0.5
"""So long an engine may keep a call of `outputs` that it has no news for."""

LATE_AFTER_S = 2.5
"""An engine that has not answered for so long gets no new requests if there is another one."""

OUTPUTS_TIMEOUT_S = 5.0
UNANSWERED_CALLS = 2
"""An engine that leaves so many calls in a row unanswered is taken for dead. One would not do: it
ends late, unanswered, too, when the router's own process was paused."""

News = Output | KvferryError
OnDeath = Callable[[InstanceId, KvferryError], None]
"""Is told which instance has died, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLink:
    """One engine as the router reaches it."""

    engine: EnginePort
    role: Role
    incarnation: Incarnation


class Legs:
    """All requests in flight, per engine.

    Per engine one parked `outputs` call carries the news of all its requests. Its failure is how
    the death of an instance is noticed: at once for a killed process, after `UNANSWERED_CALLS` of
    `OUTPUTS_TIMEOUT_S` for one that hangs.

    Args:
        engines: those there are.
        coordinator: is told of deaths.
        on_death: is told too, in the event loop, when the coordinator has been.
    """

    def __init__(
        self,
        engines: Mapping[InstanceId, EngineLink],
        coordinator: AsyncCoordinatorPort,
        on_death: OnDeath = lambda instance_id, error: None,
    ) -> None:
        self._engines = dict(engines)
        self._coordinator = coordinator
        self._on_death = on_death
        self._answered_s: dict[InstanceId, float] = {}
        self._late_until_s: dict[InstanceId, float] = {}
        self._news: dict[InstanceId, dict[RequestId, asyncio.Queue[News]]]
        self._news = {instance_id: {} for instance_id in engines}
        self._deaths: dict[InstanceId, str] = {}
        self._followers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow every engine (inside a running event loop)."""
        for instance_id, link in self._engines.items():
            self._begin_to_follow(instance_id, link)

    def join(self, instance_id: InstanceId, link: EngineLink) -> None:
        """Send requests to an instance that is new, or a new life of one that died."""
        self._engines[instance_id] = link
        self._news.setdefault(instance_id, {})
        self._deaths.pop(instance_id, None)
        self._late_until_s.pop(instance_id, None)
        self._begin_to_follow(instance_id, link)

    def _begin_to_follow(self, instance_id: InstanceId, link: EngineLink) -> None:
        self._answered_s[instance_id] = time.monotonic()
        self._followers = [task for task in self._followers if not task.done()]
        self._followers.append(asyncio.create_task(self._follow(instance_id, link)))

    async def close(self) -> None:
        """Stop following."""
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    def is_alive(self, instance_id: InstanceId) -> bool:
        """Return whether requests may be sent there."""
        return instance_id in self._engines and instance_id not in self._deaths

    def roles(self) -> dict[InstanceId, Role]:
        """Return the instances that requests may be sent to, and what each is for."""
        return {i: link.role for i, link in self._engines.items() if self.is_alive(i)}

    def suspects(self) -> set[InstanceId]:
        """Return the instances that should have answered by now and have not."""
        now_s = time.monotonic()
        silent = {i for i, s in self._answered_s.items() if now_s - s > LATE_AFTER_S}
        return silent | {i for i, until_s in self._late_until_s.items() if now_s < until_s}

    def in_flight(self) -> dict[InstanceId, int]:
        """Return the number of requests per engine."""
        return {instance_id: len(news) for instance_id, news in self._news.items()}

    def deaths(self) -> dict[InstanceId, str]:
        """Return the engines taken for dead, and why."""
        return dict(self._deaths)

    async def run(
        self, instance_id: InstanceId, request: EngineRequest, deadline: float
    ) -> AsyncGenerator[Output]:
        """Yield a request's news from one engine until it has finished.

        Leaving early (deadline, error, closed iterator) aborts the request there.

        Args:
            instance_id: the engine.
            request: its id must not be in flight there.
            deadline: on the monotonic clock.

        Raises:
            BadInputError: the request can never run there, or its id is in flight there.
            InstanceDiedError: the engine died before the request finished.
            UnavailableError: the engine did not take the request, and may live; another one may.
            DeadlineError: not finished by the deadline.
            KvferryError: as `fail` was told.
        """
        link = self._require_alive(instance_id)
        if request.request_id in self._news[instance_id]:
            raise ConfigError(
                f"a request of this id is in flight on {instance_id}",
                given=request.request_id,
                allowed="an id of its own",
            )
        news: asyncio.Queue[News] = asyncio.Queue()
        self._news[instance_id][request.request_id] = news
        finished = False
        try:
            await self._submit(instance_id, link, request)
            while not finished:
                item = await self._next(news, request, instance_id, deadline)
                finished = item.finished is not None
                yield item
        finally:
            if self._news[instance_id].get(request.request_id) is news:
                del self._news[instance_id][request.request_id]
            if not finished and self.is_alive(instance_id) and self._is_now(instance_id, link):
                await self._abort(link, request.request_id)

    def fail(self, instance_id: InstanceId, request_id: RequestId, error: KvferryError) -> None:
        """End a request's leg with an error of another one; nothing if it is not in flight."""
        news = self._news[instance_id].get(request_id)
        if news is not None:
            news.put_nowait(error)

    async def _submit(
        self, instance_id: InstanceId, link: EngineLink, request: EngineRequest
    ) -> None:
        try:
            await link.engine.submit(request, timeout_s=SUBMIT_TIMEOUT_S)
        except InstanceDiedError as error:
            await self._bury(instance_id, link, error)
            raise _death(instance_id, str(error)) from error
        except (DeadlineError, UnavailableError) as error:
            if not (self.is_alive(instance_id) and self._is_now(instance_id, link)):
                raise _death(instance_id, str(error)) from error
            # One request is no proof: its death is for those to notice who follow it.
            self._late_until_s[instance_id] = time.monotonic() + SUBMIT_TIMEOUT_S
            raise UnavailableError(
                f"instance {instance_id} did not take the request: {error}", given=instance_id
            ) from error
        except BadInputError as refusal:
            # Limits differ between instances: whoever asked must hear whose it was.
            raise type(refusal)(
                f"instance {instance_id}: {refusal.message}",
                given=refusal.given,
                allowed=refusal.allowed,
            ) from None

    async def _next(
        self,
        news: asyncio.Queue[News],
        request: EngineRequest,
        instance_id: InstanceId,
        deadline: float,
    ) -> Output:
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                item = await news.get()
        except TimeoutError:
            raise DeadlineError(
                f"request {request.request_id} did not finish in time", given=instance_id
            ) from None
        if isinstance(item, KvferryError):
            raise item
        return item

    async def _abort(self, link: EngineLink, request_id: RequestId) -> None:
        with contextlib.suppress(KvferryError):
            await link.engine.abort(request_id, timeout_s=TELL_TIMEOUT_S)

    async def _follow(self, instance_id: InstanceId, link: EngineLink) -> None:
        seq, num_unanswered = 0, 0
        while self.is_alive(instance_id) and self._is_now(instance_id, link):
            try:
                batch = await link.engine.outputs(
                    seq, wait_s=OUTPUTS_WAIT_S, timeout_s=OUTPUTS_TIMEOUT_S
                )
            except KvferryError as error:
                num_unanswered += isinstance(error, DeadlineError)
                if isinstance(error, DeadlineError) and num_unanswered < UNANSWERED_CALLS:
                    log.warning("instance %s is late: %s", instance_id, error)
                    continue
                await self._bury(instance_id, link, error)
                return
            if not self._is_now(instance_id, link):
                return
            seq, num_unanswered = batch.next_seq, 0
            self._answered_s[instance_id] = time.monotonic()
            for output in batch.outputs:
                news = self._news[instance_id].get(output.request_id)
                if news is not None:
                    news.put_nowait(output)

    async def _bury(self, instance_id: InstanceId, link: EngineLink, error: KvferryError) -> None:
        if instance_id in self._deaths or not self._is_now(instance_id, link):
            return
        reason = str(error)
        self._deaths[instance_id] = reason
        log.error("instance %s is dead: %s", instance_id, reason)
        # A new life may join while the coordinator is told: what is in flight there is not lost.
        lost, self._news[instance_id] = self._news[instance_id], {}
        incarnation = link.incarnation
        try:
            await self._coordinator.call(
                RemoveInstance(
                    call_id=f"remove/{instance_id}/{incarnation}",
                    instance_id=instance_id,
                    incarnation=incarnation,
                    reason=reason,
                ),
                timeout_s=TELL_TIMEOUT_S,
            )
        except KvferryError as unheard:
            log.warning("the coordinator was not told of %s: %s", instance_id, unheard)
        finally:
            # Also when whoever has noticed is cancelled meanwhile: nobody else would tell them.
            for news in lost.values():
                news.put_nowait(_death(instance_id, reason))
            if self._is_now(instance_id, link):
                self._on_death(instance_id, error)

    def _is_now(self, instance_id: InstanceId, link: EngineLink) -> bool:
        """Tell whether this is still the life of the instance that requests are sent to."""
        return self._engines[instance_id] is link

    def _require_alive(self, instance_id: InstanceId) -> EngineLink:
        if instance_id in self._deaths:
            raise _death(instance_id, self._deaths[instance_id])
        return self._engines[instance_id]


def _death(instance_id: InstanceId, reason: str) -> InstanceDiedError:
    return InstanceDiedError(f"instance {instance_id} died: {reason}", given=instance_id)
