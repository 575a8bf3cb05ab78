"""Warming: an instance that is new pulls the hottest prefixes of its peers."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from heapq import nlargest
from itertools import islice

from kvferry.coordinator.chains import groups_that_hold, holds, path_to, peers_of
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.moves import Tally, Warming
from kvferry.coordinator.state import ServiceState
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import BlockHash, InstanceId

# Others are answered between two such slices of a plan.
_SLICE = 256

# Listing what peers hold takes time in which nobody is answered, some 30 ms for one with 1,000,000
# blocks. Those with the most have most of what is hot, and so many of their blocks are the hottest.
_MAX_PEERS = 4
_MAX_LISTED = 1 << 16


def require_share(share: object) -> float:
    """Return the part of a pool that is warmed, if it is one.

    Raises:
        ConfigError: not a number from 0 to 1.

    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError("warm_share must be a part", given=repr(share), allowed="0 to 1")
    return float(share)


def begin_warming(state: ServiceState, taker: Instance, share: float, now: float) -> None:
    """Let a new instance want what is hot at its peers, for a share of its blocks."""
    room = int(taker.num_usable_blocks * share)
    peers = nlargest(_MAX_PEERS, peers_of(state, taker), key=_num_cached)
    if not room or not any(map(_num_cached, peers)):
        return
    # A prefix that several have is seen as often.
    num_listed = min(room, _MAX_LISTED)
    hottest = {
        peer.info.instance_id: list(islice(peer.manager.pool.hottest_first(), num_listed))
        for peer in peers
    }
    taker.warming = Warming(
        room=room,
        left=deque(_in_turn(hottest)),
        tally=Tally(purpose="warmed", started_s=now),
    )


def warm_some(state: ServiceState, taker: Instance, warming: Warming) -> None:
    """Look at some more of what is hot, and let the taker want it with the chain before it."""
    for _ in range(min(_SLICE, len(warming.left))):
        source_id, block_hash = warming.left.popleft()
        source = state.instances.get(source_id)
        if source is None or source.is_suspect:
            continue
        has = partial(_is_coming, source, taker, warming)
        path = path_to(source, block_hash, has, warming.room)
        num_blocks = sum(len(groups_that_hold(source, one)) for one in path)
        if num_blocks > warming.room:
            continue
        warming.room -= num_blocks
        warming.planned.update(path)
        for one in path:
            for group_id in groups_that_hold(source, one):
                taker.wanted.setdefault((source_id, group_id), deque()).append(one)
    if not warming.room:
        warming.left.clear()


def end_warming(state: ServiceState, taker: Instance, now: float) -> None:
    """Tell that an instance is warm, once nothing more comes to it."""
    warming = taker.warming
    if warming is None or warming.left or taker.wanted:
        return
    if any(one.move is not None for one in taker.reservations.values()):
        return
    taker.warming = None
    num_blocks = warming.tally.num_blocks.total()
    num_bytes = num_blocks * taker.info.identity.block_bytes(taker.block_tokens)
    state.note(
        "instance_warmed",
        f"{taker.info.instance_id}: {num_blocks} blocks ({num_bytes} bytes) in "
        f"{now - warming.tally.started_s:.1f} s",
    )


def _num_cached(peer: Instance) -> int:
    return peer.manager.pool.num_cached_blocks


def _in_turn(
    hottest: dict[InstanceId, list[BlockHash]],
) -> Iterator[tuple[InstanceId, BlockHash]]:
    """Yield the first of each, then the second of each, and so on."""
    for index in range(max(map(len, hottest.values()))):
        for instance_id, hashes in hottest.items():
            if index < len(hashes):
                yield instance_id, hashes[index]


def _is_coming(source: Instance, taker: Instance, warming: Warming, block_hash: BlockHash) -> bool:
    """Tell whether a taker has all of a hash that the source has, or is going to."""
    if block_hash in warming.planned:
        return True
    return holds(taker, block_hash, groups_that_hold(source, block_hash))
