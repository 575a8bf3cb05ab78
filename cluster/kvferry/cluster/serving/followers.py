"""Requests of one engine whose prompt a prefill instance computes meanwhile."""

from kvferry.cluster.serving.sequence import Sequence
from kvferry.proto.ids import RequestId


class Followers:
    """They are neither waiting nor running; one of them may be loading what has come so far."""

    def __init__(self) -> None:
        self._sequences: dict[RequestId, Sequence] = {}
        self._new: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    @property
    def any_new(self) -> bool:
        """Whether the coordinator has yet to be told of one."""
        return bool(self._new)

    def add(self, sequence: Sequence) -> None:
        """Take in a request."""
        self._sequences[sequence.request_id] = sequence
        self._new.append(sequence)

    def take_new(self) -> list[Sequence]:
        """Return those that the coordinator has yet to be told of; it is told with this."""
        new, self._new = self._new, []
        return new

    def get(self, request_id: RequestId) -> Sequence:
        """Return one that is here."""
        return self._sequences[request_id]

    def take_all(self) -> list[Sequence]:
        """Let all go."""
        sequences = list(self._sequences.values())
        self._sequences, self._new = {}, []
        return sequences

    def remove(self, request_id: RequestId) -> tuple[Sequence, bool]:
        """Let one go that is here; return it, and whether the coordinator was told of it."""
        sequence = self._sequences.pop(request_id)
        was_told = sequence not in self._new
        if not was_told:
            self._new.remove(sequence)
        return sequence, was_told
