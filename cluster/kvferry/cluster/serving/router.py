"""The router: sends prompts to instances, follows their tokens, and moves on when one dies.

One event loop. What happens on one engine is a *leg* (`legs.py`); a request's journey is a prefill
leg where that pays, a decode leg that follows it, and another decode leg if the instance dies on
the way.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kvferry.cluster.ports import AsyncCoordinatorPort
from kvferry.cluster.serving.legs import EngineLink, Legs, OnDeath
from kvferry.cluster.serving.requests import Accounting, EngineRequest, Finished
from kvferry.cluster.serving.routing import Route, choose_route, without
from kvferry.proto.errors import (
    BusyError,
    DeadlineError,
    InstanceDiedError,
    KvferryError,
    NotFoundError,
    UnavailableError,
)
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import BlockHash, InstanceId, RequestId
from kvferry.proto.messages import CloseHandoff, Locate, Located, OpenHandoff, Role, expect
from kvferry.proto.scheme import HashScheme

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
"""A coordinator that does not answer is not needed: requests go on without, see `_route`."""

PREFILL_NEWS_S = 1.0
"""The end of a prefill is waited for so long when its decode leg has ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How the router behaves."""

    request_timeout_s: float = 600.0
    """A request not finished by then ends with `DeadlineError`."""

    handoff_ttl_s: float = 60.0
    """How long a prefill instance keeps handed-over blocks for a decode side that does not come."""

    min_prefill_hashes: int = 1
    """A prefill instance is used only if nobody holds so many of the prompt's hash blocks."""

    overlap: bool = True
    """Decode instances pull the finished chunks of a prompt while the next one is computed; without
    it they are sent the prompt when its prefill is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished request: its tokens, where it ran and what that took.

    `ahead_tokens`: so many of its remote hit tokens were pulled before its prefill was over.
    Seconds count from the call on: `prefill_s` to the news that the prefill was over (None: there
    was none), `ttft_s` to the first token.
    """

    request: EngineRequest
    output_token_ids: tuple[int, ...]
    finish_reason: str
    accounting: Accounting
    prefill_computed_tokens: int
    ahead_tokens: int
    pulled_bytes: int
    preemptions: int
    prefill_s: float | None
    ttft_s: float
    prefill_instance: InstanceId | None
    decode_instance: InstanceId


@dataclass(slots=True)
class _Journey:
    """What is known of one request so far."""

    request: EngineRequest
    started: float
    deadline: float
    tokens: list[int] = field(default_factory=list)
    ttft_s: float | None = None
    prefill_instance: InstanceId | None = None
    prefill: Finished | None = None
    prefill_s: float | None = None
    not_at: set[InstanceId] = field(default_factory=set)

    def prefilled(self, finished: Finished) -> None:
        self.prefill = finished
        self.prefill_s = time.monotonic() - self.started

    def took(self, token: int) -> None:
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self.started
        self.tokens.append(token)

    def served(self, finished: Finished, decode_instance: InstanceId) -> Served:
        prefill = self.prefill
        return Served(
            request=self.request,
            output_token_ids=tuple(self.tokens),
            finish_reason=finished.reason,
            accounting=finished.accounting,
            prefill_computed_tokens=prefill.accounting.computed_tokens if prefill else 0,
            ahead_tokens=finished.ahead_tokens,
            pulled_bytes=finished.pulled_bytes,
            preemptions=finished.preemptions + (prefill.preemptions if prefill else 0),
            prefill_s=self.prefill_s,
            ttft_s=self.ttft_s if self.ttft_s is not None else time.monotonic() - self.started,
            prefill_instance=self.prefill_instance,
            decode_instance=decode_instance,
        )


class Router:
    """Routes requests over the live engines of one model."""

    def __init__(
        self,
        *,
        coordinator: AsyncCoordinatorPort,
        engines: Mapping[InstanceId, EngineLink],
        identity_digest: bytes,
        scheme: HashScheme,
        settings: RouterSettings,
        on_death: OnDeath = lambda instance_id, error: None,
    ) -> None:
        self._coordinator = coordinator
        self._legs = Legs(engines, coordinator, on_death)
        self._digest = identity_digest
        self._scheme = scheme
        self._settings = settings
        # Another router may speak to the same coordinator.
        self._caller = f"router-{secrets.token_hex(4)}"
        self._call_ids = itertools.count(1)

    async def start(self) -> None:
        """Begin to follow every engine."""
        self._legs.start()

    async def close(self) -> None:
        """Stop following; requests in flight are left to the engines' own end."""
        await self._legs.close()

    def join(self, instance_id: InstanceId, link: EngineLink) -> None:
        """Send requests to an instance that is new, or a new life of one that died."""
        self._legs.join(instance_id, link)

    def is_alive(self, instance_id: InstanceId) -> bool:
        """Return whether an instance takes requests."""
        return self._legs.is_alive(instance_id)

    async def serve(self, request: EngineRequest, *, route: Route | None = None) -> Served:
        """Run a request to its end and return everything about it.

        Args:
            request: its id must be unique among the requests in flight.
            route: where to send it; chosen by prefix and load when None.

        Raises:
            BadInputError: the request can never run (see `limits.require_fits`).
            InstanceDiedError: the instance it ran on died and no other could take it.
            UnavailableError: the only instance did not take it in time, and may live.
            DeadlineError: not finished within the request timeout.
        """
        served: Served | None = None
        async with aclosing(self.stream(request, route=route)) as events:
            async for event in events:
                if isinstance(event, Served):
                    served = event
        assert served is not None, "a stream ends with its summary or an error"
        return served

    async def stream(
        self, request: EngineRequest, *, route: Route | None = None
    ) -> AsyncGenerator[int | Served]:
        """Yield token ids as they come, then the `Served` summary; errors as in `serve`."""
        now = time.monotonic()
        journey = _Journey(
            request=request, started=now, deadline=now + self._settings.request_timeout_s
        )
        while True:
            chosen = route or await self._route(journey)
            route = None
            prefill: asyncio.Task[None] | None = None
            try:
                if chosen.prefill is not None and not journey.tokens:
                    prefill = await self._start_prefill(journey, chosen)
                if prefill is not None and not self._settings.overlap:
                    await prefill
                async with aclosing(self._decode(journey, chosen.decode, prefill)) as events:
                    async for event in events:
                        yield event
                return
            except UnavailableError as gone:
                self._move_on(journey, chosen.decode, gone)
                if prefill is not None:
                    await prefill  # whoever decodes it now finds its blocks
            finally:
                if prefill is not None:
                    prefill.cancel()
                    await asyncio.gather(prefill, return_exceptions=True)
                if journey.prefill_instance is not None:
                    await self._close_handoff(request.request_id)

    def _move_on(self, journey: _Journey, left: InstanceId, gone: UnavailableError) -> None:
        """Let a request be routed again; raise what ended its leg where nobody else can take it."""
        if not isinstance(gone, InstanceDiedError):
            # There it may be in flight still, so that it would be refused under its own id.
            journey.not_at.add(left)
            if "decode" not in self._roles(journey).values():
                raise gone
        log.warning("request %s moves on: %s", journey.request.request_id, gone)

    def _roles(self, journey: _Journey) -> dict[InstanceId, Role]:
        """Return the live instances that a request may be sent to, and what each is for."""
        return {i: r for i, r in self._legs.roles().items() if i not in journey.not_at}

    async def _decode(
        self, journey: _Journey, instance_id: InstanceId, prefill: asyncio.Task[None] | None
    ) -> AsyncGenerator[int | Served]:
        leg_request = replace(
            journey.request,
            output_token_ids=tuple(journey.tokens),
            follows_prefill=prefill is not None and not prefill.done(),
        )
        leg = self._legs.run(instance_id, leg_request, journey.deadline)
        async with aclosing(leg) as outputs:
            async for output in outputs:
                for token in output.token_ids:
                    journey.took(token)
                    yield token
                if output.finished is not None:
                    if prefill is not None:
                        await asyncio.wait({prefill}, timeout=PREFILL_NEWS_S)
                    yield journey.served(output.finished, instance_id)

    async def _route(self, journey: _Journey) -> Route:
        """Choose by prefix and load; by load alone, and without a prefill, if nobody can say."""
        request = journey.request
        hashes = self._hashes(request)
        located = await self._locate(request.request_id, hashes)
        roles = self._roles(journey)
        if located is None:
            held, avoid = {}, set[InstanceId]()
            roles = {i: role for i, role in roles.items() if role == "decode"}
        else:
            held = {one.source.instance_id: one.num_hashes for one in located.holders}
            avoid = set(located.avoid)
        roles = without(roles, avoid | self._legs.suspects())
        route = choose_route(
            roles,
            {i: num_hashes for i, num_hashes in held.items() if i in roles},
            self._legs.in_flight(),
            num_prompt_hashes=len(hashes),
            min_prefill_hashes=self._settings.min_prefill_hashes,
            hash_block_tokens=self._scheme.hash_block_tokens,
        )
        if route is None:
            deaths = self._legs.deaths()
            raise InstanceDiedError(
                f"no decode instance is left for request {request.request_id}",
                given=deaths or "none was started",
            )
        return route

    async def _locate(self, request_id: RequestId, hashes: tuple[BlockHash, ...]) -> Located | None:
        """Return who holds what of the prefix; None if the coordinator does not answer."""
        try:
            located = await self._coordinator.call(
                Locate(identity_digest=self._digest, hashes=hashes), timeout_s=CALL_TIMEOUT_S
            )
        except (UnavailableError, DeadlineError, BusyError) as error:
            log.warning("request %s is routed by load alone: %s", request_id, error)
            return None
        return expect(located, Located)

    def _hashes(self, request: EngineRequest) -> tuple[BlockHash, ...]:
        # Short of the last token: at least one token must run to give logits.
        return hash_tokens(self._scheme, request.prompt_token_ids[:-1], request.keys)

    async def _start_prefill(self, journey: _Journey, route: Route) -> asyncio.Task[None] | None:
        """Open a handoff and let a prefill instance begin; None means D computes the prompt."""
        assert route.prefill is not None
        request_id = journey.request.request_id
        journey.prefill_instance = route.prefill
        try:
            await self._open_handoff(request_id, route.prefill, route.decode)
        except (UnavailableError, DeadlineError, BusyError, NotFoundError) as error:
            log.warning("request %s: no prefill at %s: %s", request_id, route.prefill, error)
            return None
        # It runs when the caller waits for the first time; by then the decode leg is in flight.
        return asyncio.create_task(self._prefill(journey, route.prefill, route.decode))

    async def _prefill(self, journey: _Journey, instance: InstanceId, decode: InstanceId) -> None:
        """Follow a prefill to its end; a failure only means D computes the rest.

        Raises:
            KvferryError: the request was refused, or is late; its decode leg ends with it.
        """
        request_id = journey.request.request_id
        leg_request = replace(journey.request, prefill_only=True)
        has_handed_over = False
        try:
            async with aclosing(self._legs.run(instance, leg_request, journey.deadline)) as outputs:
                async for output in outputs:
                    if output.finished is not None:
                        journey.prefilled(output.finished)
                        has_handed_over = _hands_over(output.finished)
        except (UnavailableError, BusyError, NotFoundError) as error:
            log.warning("request %s: no prefill at %s: %s", request_id, instance, error)
            if isinstance(error, UnavailableError) and not isinstance(error, InstanceDiedError):
                journey.not_at.add(instance)  # as after a decode leg, it may be in flight there
        except KvferryError as error:
            refusal = type(error)(
                f"prefill at {instance}: {error.message}", given=error.given, allowed=error.allowed
            )
            self._legs.fail(decode, request_id, refusal)
            raise refusal from error
        if not has_handed_over:
            await self._close_handoff(request_id)  # nobody need wait for anything

    async def _open_handoff(
        self, request_id: RequestId, prefill: InstanceId, decode: InstanceId
    ) -> None:
        await self._coordinator.call(
            OpenHandoff(
                call_id=self._call_id(),
                request_id=request_id,
                prefill_instance=prefill,
                decode_instance=decode,
                ttl_s=self._settings.handoff_ttl_s,
            ),
            timeout_s=CALL_TIMEOUT_S,
        )

    async def _close_handoff(self, request_id: RequestId) -> None:
        try:
            await self._coordinator.call(
                CloseHandoff(call_id=self._call_id(), request_id=request_id),
                timeout_s=CALL_TIMEOUT_S,
            )
        except KvferryError as error:  # its deadline closes it
            log.warning("handoff of %s stays open: %s", request_id, error)

    def _call_id(self) -> str:
        return f"{self._caller}/{next(self._call_ids)}"


def _hands_over(finished: Finished) -> bool:
    """Tell whether a prefill has left anything for the decode side, and its handoff open."""
    parts = finished.accounting
    in_place = parts.local_hit_tokens + parts.remote_hit_tokens + parts.computed_tokens
    return finished.reason == "prefilled" and in_place > 0
