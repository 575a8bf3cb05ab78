"""Whether a process that answered before has stopped answering. Pure."""

from dataclasses import dataclass

FROZEN_AFTER_TURNS = 10
STARTED_AFTER_TURNS = 120
"""A process that has never answered may be starting for so long."""


@dataclass(slots=True)
class Canary:
    """One process that is asked a question at a time, and looked after in turns.

    Turns are counted and not seconds, as whoever looks may have been paused itself.

    Args:
        has_answered: somebody else has had an answer of it.
    """

    has_answered: bool = False
    _num_silent_turns: int = 0

    def answered(self) -> None:
        """Take note of an answer."""
        self.has_answered = True
        self._num_silent_turns = 0

    def ended(self) -> None:
        """Take note that the process is gone; another one may be starting in its place."""
        self.has_answered = False
        self._num_silent_turns = 0

    def is_frozen(self) -> bool:
        """Take note of another turn without an answer, and tell whether there were too many."""
        self._num_silent_turns += 1
        limit = FROZEN_AFTER_TURNS if self.has_answered else STARTED_AFTER_TURNS
        return self._num_silent_turns >= limit
