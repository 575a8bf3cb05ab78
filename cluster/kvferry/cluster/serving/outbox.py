"""News of an engine, kept until the router has taken it."""

import threading
from collections import deque

from kvferry.cluster.serving.requests import Output, OutputBatch
from kvferry.proto.errors import InstanceDiedError
from kvferry.proto.ids import InstanceId


class Outbox:
    """A numbered queue: asking from a sequence number acknowledges everything before it."""

    def __init__(self, instance_id: InstanceId) -> None:
        self._instance_id = instance_id
        self._outputs: deque[Output] = deque()
        self._first_seq = 0
        self._failure: str | None = None
        self._failed_with: type[InstanceDiedError] = InstanceDiedError
        self._cause: Exception | None = None
        self._changed = threading.Condition()

    def put(self, outputs: tuple[Output, ...]) -> None:
        """Add news at the end."""
        if outputs:
            with self._changed:
                self._outputs.extend(outputs)
                self._changed.notify_all()

    def fail(
        self,
        reason: str,
        kind: type[InstanceDiedError] = InstanceDiedError,
        cause: Exception | None = None,
    ) -> None:
        """Let every present and later `take` end with an error, once earlier news is taken."""
        with self._changed:
            self._cause = cause
            self._failed_with = kind
            self._failure = reason
            self._changed.notify_all()

    def require_alive(self) -> None:
        """Raise if the engine's loop has failed.

        Raises:
            InstanceDiedError: naming the instance and the reason, from what the loop met.
        """
        if self._failure is not None:
            raise self._failed_with(
                f"the engine of instance {self._instance_id} has failed: {self._failure}",
                given=self._instance_id,
            ) from self._cause

    def take(self, since_seq: int, wait_s: float) -> OutputBatch:
        """Return news from `since_seq` on, waiting up to `wait_s` for the first.

        Raises:
            InstanceDiedError: the loop has failed and all earlier news was taken.
        """
        with self._changed:
            while self._outputs and self._first_seq < since_seq:
                self._outputs.popleft()
                self._first_seq += 1
            if not self._outputs and self._failure is None:
                self._changed.wait(wait_s)
            if not self._outputs:
                self.require_alive()
            return OutputBatch(
                outputs=tuple(self._outputs), next_seq=self._first_seq + len(self._outputs)
            )
