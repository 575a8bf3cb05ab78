"""Requests that have ended: the coordinator is told first, then whoever waits for the request.

Whoever reads that a request is finished goes on to look for its blocks elsewhere.
"""

from kvferry.cluster.serving.requests import FinishReason, Output
from kvferry.cluster.serving.sequence import Sequence
from kvferry.proto.step_messages import Release


class Endings:
    """Releases for the next step, and the news that must wait until a step with them was taken."""

    def __init__(self) -> None:
        self._releases: list[Release] = []
        self._waiting: list[Output] = []
        self._in_step: list[Output] = []

    @property
    def any_untold(self) -> bool:
        """Whether the coordinator has yet to be told of one."""
        return bool(self._releases)

    def add(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take note that a request which the coordinator knows has ended."""
        self._releases.append(
            Release(request_id=sequence.request_id, handoff=reason == "prefilled")
        )
        self._waiting.append(sequence.ended(reason))

    def take_releases(self) -> tuple[Release, ...]:
        """Return those for a step; they are not returned again."""
        releases, self._releases = tuple(self._releases), []
        self._in_step, self._waiting = self._waiting, []
        return releases

    def told(self) -> list[Output]:
        """Return the news that goes with the last step, which was taken."""
        news, self._in_step = self._in_step, []
        return news

    def forgotten(self) -> list[Output]:
        """Return all news: the coordinator knows of none of these requests any more."""
        news = [*self._in_step, *self._waiting]
        self._releases, self._in_step, self._waiting = [], [], []
        return news
