"""Small values of a service that outlive its processes, and the coordinator's registry in them."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvferry.coordinator.registry import Memory, require_last
from kvferry.proto.ids import Epoch

LIFE = "life"
FRONTS = "fronts"
KV_EVENTS = "kv-events"
KV_REPLAYS = "kv-replays"


class Record(Protocol):
    """The values of one service by name: plain objects of some hundred bytes, as JSON has them."""

    def read(self, name: str) -> dict[str, Any]:
        """Return a value, empty where there is none.

        Raises:
            UnavailableError: nobody answers who keeps it.
        """

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a value in place of the last one of this name.

        Raises:
            UnavailableError: nobody answers who keeps it; it may have been kept all the same.
        """


class ProcessRecord:
    """Keeps the values in this process: for services that end with it."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}

    def read(self, name: str) -> dict[str, Any]:
        """See `Record.read`."""
        return dict(self._values.get(name, {}))

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """See `Record.write`."""
        self._values[name] = dict(value)


class RecordRegistry:
    """`Registry` in a record.

    The first epoch of a service is the time in seconds since 1970: what an earlier service of the
    same name has left anywhere must not look like this one's.
    """

    def __init__(self, record: Record, clock: Callable[[], float] = time.time) -> None:
        self._record = record
        self._clock = clock

    def begin(self) -> Memory:
        """See `Registry.begin`."""
        last = self._record.read(LIFE)
        memory = Memory(
            epoch=Epoch(last["epoch"] + 1 if last else int(self._clock())),
            resets={
                bytes.fromhex(digest): count for digest, count in last.get("resets", {}).items()
            },
        )
        self._write(memory)
        return memory

    def last(self) -> Epoch:
        """Return the epoch of the last life that has begun, 0 before the first.

        Raises:
            UnavailableError: as `Record.read`.
        """
        return Epoch(self._record.read(LIFE).get("epoch", 0))

    def save(self, memory: Memory) -> None:
        """See `Registry.save`. Of two lives at once that save at once, either may be refused."""
        require_last(memory, self.last())
        self._write(memory)

    def _write(self, memory: Memory) -> None:
        resets = {digest.hex(): count for digest, count in memory.resets.items()}
        self._record.write(LIFE, {"epoch": memory.epoch, "resets": resets})
