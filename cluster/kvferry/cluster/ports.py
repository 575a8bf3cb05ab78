"""The seams of the cluster: what the engine, the router and the launcher need from others.

Each has a real implementation, over Ray (`ray_handles`, `ray_ranks`) or gRPC
(`coordinator_client`), and can be played by an object in the same process; errors are always
kvferry's own.
"""

from typing import Any, Protocol

from kvferry.cluster.serving.requests import EngineRequest, OutputBatch
from kvferry.proto.ids import RequestId
from kvferry.proto.messages import Command, Reply


class CoordinatorPort(Protocol):
    """The coordinator, from a thread that may block."""

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        """Return the reply.

        Raises:
            KvferryError: as the coordinator raised it; `UnavailableError` or `DeadlineError` when
                it does not answer.
        """


class AsyncCoordinatorPort(Protocol):
    """The coordinator, from an event loop."""

    async def call(self, command: Command, *, timeout_s: float) -> Reply:
        """Return the reply; errors as in `CoordinatorPort`."""


class PendingCall(Protocol):
    """A call of another process that is under way."""

    def done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for its end, and tell whether it has come."""

    def result(self, timeout_s: float) -> Any:
        """Return what it returned.

        Raises:
            KvferryError: as the other process raised it.
            InstanceDiedError: that process is gone.
            DeadlineError: no answer within `timeout_s`.
        """


class RankPort(Protocol):
    """Another rank of one's own instance: a `Rank` in a process of its own."""

    def begin(self, method: str, *arguments: Any) -> PendingCall:
        """Call a method of the rank."""


class EnginePort(Protocol):
    """One engine, from an event loop."""

    async def submit(self, request: EngineRequest, *, timeout_s: float) -> None:
        """Queue a request; raises what `require_fits` raises."""

    async def abort(self, request_id: RequestId, *, timeout_s: float) -> None:
        """End a request early; unknown ids are ignored."""

    async def outputs(self, since_seq: int, *, wait_s: float, timeout_s: float) -> OutputBatch:
        """Return news from `since_seq` on, waiting up to `wait_s` for the first.

        Raises:
            InstanceDiedError: the engine's process is gone or its loop has failed.
            DeadlineError: no answer within `timeout_s`.
        """
