"""Which peer gets what of an instance that is being emptied.

A block is of use only with those before it, so a peer gets a block and what it lacks of the chain
before it together. What a peer holds anyway stays where it is. A peer gives up blocks that hold
nothing, and at most a part of its coldest ones.
"""

from collections import deque
from collections.abc import Iterator

from kvferry.coordinator.chains import groups_that_hold, holds, parent_of, peers_of
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.moves import Draining
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import left_free
from kvferry.proto.ids import BlockHash, InstanceId

# Others are answered between two such slices of a plan.
_SLICE = 256
# A peer forgets at most a quarter of its blocks, the coldest, for those of one that goes.
_FORGETS = 4


def plan_some(state: ServiceState, source: Instance, drain: Draining) -> None:
    """Look at some more of what an instance holds, and let peers want what only it has."""
    plan = _Plan(state, source, drain)
    if not any(drain.rooms.values()):
        drain.left.clear()
    for _ in range(min(_SLICE, len(drain.left))):
        plan.look_at(drain.left.popleft())


class _Plan:
    """The plan of a drain, with the peers there are now."""

    def __init__(self, state: ServiceState, source: Instance, drain: Draining) -> None:
        self._state = state
        self._source = source
        self._drain = drain
        self._peers = {peer.info.instance_id: peer for peer in peers_of(state, source)}
        for instance_id in drain.rooms.keys() - self._peers.keys():
            self._forget(instance_id)
        for instance_id in self._peers.keys() - drain.rooms.keys():
            drain.rooms[instance_id] = _room(self._peers[instance_id])

    def look_at(self, block_hash: BlockHash) -> None:
        """Let a peer want a block that only the source has, unless it fits nowhere."""
        num_copies = len(groups_that_hold(self._source, block_hash))
        if block_hash in self._drain.planned:
            return
        if any(True for _ in self._holders(block_hash)):
            self._drain.num_elsewhere += num_copies
        elif num_copies:
            self._place(block_hash)

    def _forget(self, instance_id: InstanceId) -> None:
        """Plan again what was meant for a peer that is gone."""
        drain = self._drain
        del drain.rooms[instance_id]
        for block_hash, whom in list(drain.planned.items()):
            whom.discard(instance_id)
            if not whom:
                del drain.planned[block_hash]
                drain.left.appendleft(block_hash)

    def _holders(self, block_hash: BlockHash) -> Iterator[InstanceId]:
        """Yield the peers that have all of a hash that the source has."""
        groups = groups_that_hold(self._source, block_hash)
        own = self._source.info.instance_id
        return filter(self._peers.__contains__, self._state.index.holders(own, block_hash, groups))

    def _place(self, block_hash: BlockHash) -> None:
        """Let the peer that must get least for a block have it; nobody if it fits nowhere."""
        best: tuple[tuple[int, bool, int, InstanceId], list[BlockHash]] | None = None
        for instance_id in self._candidates(block_hash):
            path = self._path(self._peers[instance_id], block_hash)
            num_blocks = sum(len(groups_that_hold(self._source, one)) for one in path)
            room = self._drain.rooms[instance_id]
            rank = (num_blocks, instance_id != self._drain.last, -room, instance_id)
            if num_blocks <= room and (best is None or rank < best[0]):
                best = rank, path
        if best is not None:
            (num_blocks, _, _, instance_id), path = best
            self._give(instance_id, path, num_blocks)

    def _candidates(self, block_hash: BlockHash) -> set[InstanceId]:
        """Return those with room that have what is before a block; all with room if nobody has."""
        rooms, last = self._drain.rooms, self._drain.last
        before = parent_of(self._source, block_hash)
        if before is None and last is not None and rooms.get(last):
            return {last}
        having: set[InstanceId] = set()
        if before is not None:
            having.update(self._holders(before))
            having |= self._drain.planned.get(before, set())
        with_room = {instance_id for instance_id, room in rooms.items() if room > 0}
        return having & with_room or with_room

    def _path(self, peer: Instance, block_hash: BlockHash) -> list[BlockHash]:
        """Return what a peer lacks of the chain up to a block, in order, as far as it is there.

        No longer than there is room for and one more.
        """
        path: list[BlockHash] = [block_hash]
        one = parent_of(self._source, block_hash)
        room = self._drain.rooms[peer.info.instance_id]
        while one is not None and len(path) <= room and not self._has(peer, one):
            path.append(one)
            one = parent_of(self._source, one)
        path.reverse()
        return path

    def _has(self, peer: Instance, block_hash: BlockHash) -> bool:
        """Tell whether a peer has all of a hash that the source has, or is going to."""
        if peer.info.instance_id in self._drain.planned.get(block_hash, ()):
            return True
        return holds(peer, block_hash, groups_that_hold(self._source, block_hash))

    def _give(self, instance_id: InstanceId, path: list[BlockHash], num_blocks: int) -> None:
        drain, source_id = self._drain, self._source.info.instance_id
        drain.last = instance_id
        drain.rooms[instance_id] -= num_blocks
        wanted = self._peers[instance_id].wanted
        for one in path:
            drain.planned.setdefault(one, set()).add(instance_id)
            for group_id in groups_that_hold(self._source, one):
                wanted.setdefault((source_id, group_id), deque()).append(one)


def _room(peer: Instance) -> int:
    pool = peer.manager.pool
    num_blank = max(pool.num_free_blocks - pool.num_cached_blocks, 0)
    usable = pool.num_free_blocks - left_free(peer)
    return max(min(num_blank + peer.num_usable_blocks // _FORGETS, usable), 0)
