"""What is remembered of blocks that move between instances without a request.

Decides nothing; `moving.py`, `draining.py` and `warming.py` do.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.coordinator.pool_events import PoolEvent, Removed, Stored
from kvferry.proto.ids import BlockHash, GroupId, InstanceId, LeaseId

Wanted = dict[tuple[InstanceId, GroupId], deque[BlockHash]]
"""What an instance is going to pull: per source and group, what comes first in front."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Blocks that came to each instance since a time (seconds on the service's clock).

    `purpose` is "drained" or "warmed": the service's counters are called so.
    """

    purpose: str
    started_s: float
    num_blocks: Counter[InstanceId] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveInFlight:
    """A reservation is being filled from a peer: what is leased there, and where it is counted.

    `parents[i]` is the hash before `hashes[i]` of the reservation, None where nobody knows it.
    """

    source: InstanceId
    lease_id: LeaseId
    parents: tuple[BlockHash | None, ...]
    tally: Tally


@dataclass(slots=True, kw_only=True)
class Warming:
    """A new instance may want `room` more blocks, of what its peers have.

    `left`: who has which hash, hottest first, that have not been looked at. `planned`: what it is
    going to get.
    """

    room: int
    left: deque[tuple[InstanceId, BlockHash]]
    tally: Tally
    planned: set[BlockHash] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Draining:
    """An instance does nothing new, and is removed at `deadline_s` at the latest.

    `left`: hashes that have not been looked at, hottest first. `unplaced`: those that fit at no
    peer that was `live` then. `rooms`: how many more blocks each destination may get. `planned`:
    whom a hash was given to. `last`: who got the last. `num_cached_blocks` were held when it began.
    `num_elsewhere`: blocks that peers held anyway.
    """

    deadline_s: float
    num_cached_blocks: int
    left: deque[BlockHash]
    tally: Tally
    unplaced: deque[BlockHash] = field(default_factory=deque)
    live: set[InstanceId] = field(default_factory=set)
    rooms: dict[InstanceId, int] = field(default_factory=dict)
    planned: dict[BlockHash, set[InstanceId]] = field(default_factory=dict)
    last: InstanceId | None = None
    num_elsewhere: int = 0

    def follow(self, events: Iterable[PoolEvent]) -> None:
        """Take in what the pool did: its last requests write more, and overwrite what is cold."""
        new: list[BlockHash] = []
        for event in events:
            if isinstance(event, Stored):
                new += event.hashes
            elif isinstance(event, Removed):
                for block_hash in event.hashes:
                    self.planned.pop(block_hash, None)
            else:
                self.planned.clear()
        self.left.extendleft(reversed(new))

    def forget(self, instance_id: InstanceId) -> None:
        """Plan again what was meant for an instance that takes nothing any more."""
        if self.rooms.pop(instance_id, None) is None:
            return
        again: list[BlockHash] = []
        for block_hash, whom in list(self.planned.items()):
            whom.discard(instance_id)
            if not whom:
                del self.planned[block_hash]
                again.append(block_hash)
        self.left.extendleft(reversed(again))
