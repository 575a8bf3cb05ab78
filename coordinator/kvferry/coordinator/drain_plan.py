"""Which peer gets what of an instance that is being emptied.

A block is of use only with those before it, so a peer gets a block and what it lacks of the chain
before it together. What a peer holds anyway stays where it is. A peer gives up blocks that hold
nothing, and at most a part of its coldest ones.
"""

from collections import deque
from collections.abc import Iterable

from kvferry.coordinator.chains import groups_that_hold, holds, parent_of, peers_of
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.moves import Draining
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import left_free
from kvferry.proto.ids import BlockHash

# Others are answered between two such slices of a plan.
_SLICE = 512
# A peer forgets at most a quarter of its blocks, the coldest, for those of one that goes.
_FORGETS = 4


def plan_some(state: ServiceState, source: Instance, drain: Draining) -> None:
    """Look at some more of what an instance holds, and let peers want what only it has."""
    peers = _peers(state, source, drain)
    if not any(drain.rooms.values()):
        drain.left.clear()
    for _ in range(min(_SLICE, len(drain.left))):
        block_hash = drain.left.popleft()
        groups = groups_that_hold(source, block_hash)
        if any(block_hash in planned for planned in drain.planned.values()):
            continue
        if any(holds(peer, block_hash, groups) for peer in peers):
            drain.num_elsewhere += len(groups)
        elif groups:
            _place(source, drain, peers, block_hash)


def _peers(state: ServiceState, source: Instance, drain: Draining) -> list[Instance]:
    """Return who can take blocks, and plan again what was meant for those that are gone."""
    peers = peers_of(state, source)
    known = {peer.info.instance_id for peer in peers}
    for instance_id in [i for i in drain.planned if i not in known]:
        drain.left.extendleft(drain.planned.pop(instance_id))
        del drain.rooms[instance_id]
    for peer in peers:
        if peer.info.instance_id not in drain.planned:
            drain.planned[peer.info.instance_id] = set()
            drain.rooms[peer.info.instance_id] = _room(peer)
    return peers


def _room(peer: Instance) -> int:
    pool = peer.manager.pool
    num_blank = max(pool.num_free_blocks - pool.num_cached_blocks, 0)
    usable = pool.num_free_blocks - left_free(peer)
    return max(min(num_blank + peer.num_usable_blocks // _FORGETS, usable), 0)


def _place(source: Instance, drain: Draining, peers: list[Instance], block_hash: BlockHash) -> None:
    """Let the peer that must get least for it have a block; nobody if it fits nowhere."""
    before = parent_of(source, block_hash)
    best: tuple[tuple[int, bool, int], Instance, list[BlockHash]] | None = None
    for peer in _those_with(source, drain, peers, before) or peers:
        path = _path(source, drain, peer, block_hash)
        num_blocks = sum(len(groups_that_hold(source, one)) for one in path)
        room = drain.rooms[peer.info.instance_id]
        if num_blocks > room:
            continue
        rank = (num_blocks, peer.info.instance_id != drain.last, -room)
        if best is None or rank < best[0]:
            best = rank, peer, path
    if best is None:
        return
    (num_blocks, _, _), peer, path = best
    drain.last = peer.info.instance_id
    drain.rooms[drain.last] -= num_blocks
    drain.planned[drain.last].update(path)
    for one in path:
        for group_id in groups_that_hold(source, one):
            key = source.info.instance_id, group_id
            peer.wanted.setdefault(key, deque()).append(one)


def _those_with(
    source: Instance, drain: Draining, peers: Iterable[Instance], before: BlockHash | None
) -> list[Instance]:
    """Return the peers with room that need nothing else for a block after `before`."""
    return [
        peer
        for peer in peers
        if drain.rooms[peer.info.instance_id] > 0 and _has(source, drain, peer, before)
    ]


def _path(
    source: Instance, drain: Draining, peer: Instance, block_hash: BlockHash
) -> list[BlockHash]:
    """Return what a peer lacks of the chain up to a block, in order, as far as it is there.

    No longer than there is room for and one more.
    """
    path = [block_hash]
    room = drain.rooms[peer.info.instance_id]
    while len(path) <= room:
        before = parent_of(source, path[-1])
        if _has(source, drain, peer, before):
            break
        assert before is not None
        path.append(before)
    path.reverse()
    return path


def _has(source: Instance, drain: Draining, peer: Instance, block_hash: BlockHash | None) -> bool:
    """Tell whether a peer has all of a hash that the source has, or is going to."""
    if block_hash is None or block_hash in drain.planned[peer.info.instance_id]:
        return True
    return holds(peer, block_hash, groups_that_hold(source, block_hash))
