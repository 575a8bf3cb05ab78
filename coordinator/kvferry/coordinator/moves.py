"""What is remembered of blocks that move between instances without a request.

Decides nothing; `moving.py`, `draining.py` and `warming.py` do.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
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


MAX_TRIES = 3
"""So often a block is moved that does not come, each time to another peer if there is one."""


@dataclass(slots=True, kw_only=True)
class Draining:
    """An instance does nothing new, and is removed at `deadline_s` at the latest.

    `left`: hashes that have not been looked at, hottest first. `unplaced`: those that fit at no
    peer that was `live` then. `rooms`: how many more blocks each destination may get. `planned`:
    whom a hash was given to. `failed`: at whom it did not come. `last`: who got the last.
    `num_cached_blocks` were held when it began. `elsewhere`: what peers held anyway, and in how
    many blocks.
    """

    deadline_s: float
    num_cached_blocks: int
    left: deque[BlockHash]
    tally: Tally
    unplaced: deque[BlockHash] = field(default_factory=deque)
    live: set[InstanceId] = field(default_factory=set)
    rooms: dict[InstanceId, int] = field(default_factory=dict)
    planned: dict[BlockHash, set[InstanceId]] = field(default_factory=dict)
    failed: dict[BlockHash, list[InstanceId]] = field(default_factory=dict)
    last: InstanceId | None = None
    elsewhere: dict[BlockHash, int] = field(default_factory=dict)

    def follow(self, events: Iterable[PoolEvent]) -> None:
        """Take in what the pool did: its last requests write more, and overwrite what is cold."""
        new: list[BlockHash] = []
        for event in events:
            if isinstance(event, Stored):
                new += event.hashes
            elif isinstance(event, Removed):
                for block_hash in event.hashes:
                    self.planned.pop(block_hash, None)
                    self.elsewhere.pop(block_hash, None)
            else:
                self.planned.clear()
                self.elsewhere.clear()
        self.left.extendleft(reversed(new))

    def fail(self, taker: InstanceId, hashes: Sequence[BlockHash]) -> None:
        """Plan again what did not come to a taker, unless it was tried too often."""
        if taker in self.rooms:
            self.rooms[taker] += len(hashes)
        again: list[BlockHash] = []
        for block_hash in hashes:
            if taker not in self.planned.get(block_hash, ()):
                continue  # another group of it has failed, too, or the source has it no more
            failed = self.failed.setdefault(block_hash, [])
            failed.append(taker)
            if self._take_back(block_hash, taker) and len(failed) < MAX_TRIES:
                again.append(block_hash)
        self.left.extendleft(reversed(again))

    def forget(self, instance_id: InstanceId) -> None:
        """Look again at what somebody who is gone was to get, or may have had alone."""
        if self.rooms.pop(instance_id, None) is None:
            return
        # If it comes back, it has room again.
        self.live.discard(instance_id)
        again = [one for one in list(self.planned) if self._take_back(one, instance_id)]
        self.left.extendleft(reversed(again))
        self.left.extend(self.elsewhere)
        self.elsewhere.clear()

    def _take_back(self, block_hash: BlockHash, instance_id: InstanceId) -> bool:
        """Give a hash to somebody no more; tell whether nobody gets it now."""
        whom = self.planned[block_hash]
        whom.discard(instance_id)
        if not whom:
            del self.planned[block_hash]
        return not whom
