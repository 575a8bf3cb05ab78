"""Coordinator and engines behind Ray actor handles; Ray's errors become kvferry's own."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from kvferry.cluster.serving.requests import EngineRequest, OutputBatch
from kvferry.proto.errors import (
    DeadlineError,
    InstanceDiedError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.messages import Command, Reply

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def get(ref: Any, *, timeout_s: float, who: str) -> Any:
    """Return a call's value, or raise a kvferry error that names `who` was asked.

    Raises:
        KvferryError: as the actor raised it.
        InstanceDiedError: the actor's process is gone for good.
        DeadlineError: no answer in time.
        UnavailableError: the actor's process is gone, and another comes; or the actor failed in
            another way.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except Exception as error:
        raise translated(error, who=who, timeout_s=timeout_s) from None


async def get_async(ref: Any, *, timeout_s: float, who: str) -> Any:
    """Return a call's value inside an event loop; errors as in `get`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except Exception as error:
        raise translated(error, who=who, timeout_s=timeout_s) from None


def end_actors(actors: Sequence[ActorHandle[Any]], timeout_s: float) -> None:
    """Ask actors to stop, all at once, and kill them after `timeout_s` at the latest."""
    stopping: list[Any] = [actor.stop.remote() for actor in actors]
    if stopping:
        with contextlib.suppress(Exception):  # one that died cannot be asked
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
    for actor in actors:
        ray.kill(actor)


def translated(error: Exception, *, who: str, timeout_s: float) -> KvferryError:
    """Return the kvferry error that stands for one of Ray's."""
    if isinstance(error, KvferryError) and not isinstance(error, RayTaskError):
        return error
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, KvferryError):
            return error.cause
        return UnavailableError(f"{who} failed: {error.cause!r}")
    if isinstance(error, GetTimeoutError | TimeoutError):
        return DeadlineError(f"{who} did not answer", given=f"{timeout_s:g} s")
    if isinstance(error, RayActorError):
        # Of an actor that Ray makes anew, the calls until then have failed and may have run.
        comes_back = isinstance(error, ActorUnavailableError)
        kind = UnavailableError if comes_back else InstanceDiedError
        return kind(f"the process of {who} is gone: {_reason(error)}", given=who)
    return UnavailableError(f"{who} cannot be reached: {error!r}")


def _reason(error: RayActorError) -> str:
    """Return the lines of Ray's report that a person needs: what happened, and the last cause."""
    plain = _COLOURS.sub("", str(error)).strip()
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if error.actor_init_failed:
        return lines[-1]  # the exception that ended the start
    return lines[0] if lines else repr(error)


class RayAsyncCoordinator:
    """`AsyncCoordinatorPort` over a `RayCoordinatorActor`'s handle."""

    def __init__(self, handle: ActorHandle[Any]) -> None:
        self._handle = handle

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        """See `AsyncCoordinatorPort.call`."""
        ref: Any = self._handle.call.remote(command)
        reply: Reply = await get_async(ref, timeout_s=timeout_s, who="the coordinator")
        return reply


class RayEngine:
    """`EnginePort` over an actor handle."""

    def __init__(self, handle: ActorHandle[Any], instance_id: InstanceId) -> None:
        self._handle = handle
        self._who = f"instance {instance_id}"

    async def submit(self, request: EngineRequest, *, timeout_s: float) -> None:
        """See `EnginePort.submit`."""
        await get_async(self._handle.submit.remote(request), timeout_s=timeout_s, who=self._who)

    async def abort(self, request_id: RequestId, *, timeout_s: float) -> None:
        """See `EnginePort.abort`."""
        await get_async(self._handle.abort.remote(request_id), timeout_s=timeout_s, who=self._who)

    async def outputs(self, since_seq: int, *, wait_s: float, timeout_s: float) -> OutputBatch:
        """See `EnginePort.outputs`."""
        ref: Any = self._handle.outputs.remote(since_seq, wait_s)
        batch: OutputBatch = await get_async(ref, timeout_s=timeout_s, who=self._who)
        return batch
