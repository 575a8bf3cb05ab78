"""What outlives a coordinator: its epoch, and how often each identity was reset."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.proto.errors import StaleError
from kvferry.proto.ids import Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is remembered of a service in one life of its coordinator.

    `resets`: so often was an identity (by its digest) reset, in all lives together.
    """

    epoch: Epoch
    resets: Mapping[bytes, int] = field(default_factory=dict)


class Registry(Protocol):
    """Where the `Memory` of one service is kept, safe from the coordinator's death."""

    def begin(self) -> Memory:
        """Begin a life, under an epoch that is kept by then and that no earlier life had.

        Raises:
            UnavailableError: it cannot be read or written now.
        """

    def save(self, memory: Memory) -> None:
        """Keep what this life remembers.

        Raises:
            StaleError: a later life has begun.
            UnavailableError: it cannot be written now.
        """


def require_last(memory: Memory, last: Epoch) -> None:
    """Refuse the memory of a life that is over.

    Raises:
        StaleError: a later one has begun; with both epochs.
    """
    if memory.epoch != last:
        raise StaleError(
            "a later life of the coordinator has begun", given=memory.epoch, allowed=last
        )


class ProcessRegistry:
    """Keeps the memory in this process: for coordinators that end with it."""

    def __init__(self) -> None:
        self._memory = Memory(epoch=Epoch(0))

    def begin(self) -> Memory:
        """See `Registry.begin`; the first epoch is 1."""
        self._memory = replace(self._memory, epoch=Epoch(self._memory.epoch + 1))
        return self._memory

    def save(self, memory: Memory) -> None:
        """See `Registry.save`."""
        require_last(memory, self._memory.epoch)
        self._memory = memory
