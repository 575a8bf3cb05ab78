"""Moves: an instance that lives pulls blocks of a peer for no request.

What it wants is in `Instance.wanted`. Bounded, so that requests come first: few moves at once, each
of a bounded size, and never into the blocks that are to stay free for requests.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvferry.coordinator.drain_plan import plan_some
from kvferry.coordinator.instances import Instance, Reservation
from kvferry.coordinator.leases import Lease
from kvferry.coordinator.moves import MoveInFlight, Tally
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import left_free
from kvferry.coordinator.warming import end_warming, warm_some
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, InstanceId, LeaseId
from kvferry.proto.step_messages import MAX_MOVES, Move

MAX_MOVE_BYTES = 64 << 20
_FEW_WANTED = 256

MOVE_TTL_S = 30.0
"""A move that takes longer fails; its source's blocks are free then."""


class _Batch(NamedTuple):
    """Blocks of a group at a source, by their hashes, to be moved together."""

    source: Instance
    group_id: GroupId
    found: dict[BlockHash, BlockId]


def begin_moves(state: ServiceState, taker: Instance, now: float) -> tuple[Move, ...]:
    """Begin what may be begun now, and return it for the taker to carry out."""
    for source in state.draining.values():
        # What is planned already comes first: a plan takes time, too.
        if source.draining is not None and num_wanted(state, source) < _FEW_WANTED:
            plan_some(state, source, source.draining)
    if taker.warming is not None and not taker.wanted:
        warm_some(state, taker, taker.warming)
    num_open = sum(one.move is not None for one in taker.reservations.values())
    moves: list[Move] = []
    while num_open + len(moves) < MAX_MOVES and (move := _next_move(state, taker, now)):
        moves.append(move)
    end_warming(state, taker, now)
    return tuple(moves)


def moves_of_store(state: ServiceState, instance: Instance, now: float) -> tuple[Move, ...]:
    """Return what a store is to pull now; engines hear of theirs in their steps.

    What was begun is said again until it has ended, since the answer to a heartbeat may be lost.
    """
    if instance.info.role != "store" or instance.returning_as is not None:
        return ()
    return (*_begun_moves(state, instance, now), *begin_moves(state, instance, now))


def end_move(state: ServiceState, taker: Instance, reservation: Reservation, num_kept: int) -> None:
    """Take in that a move has ended, of which so many blocks can be found at the taker now."""
    move = reservation.move
    if move is None:
        return
    state.end_lease(move.lease_id)
    move.tally.num_blocks[taker.info.instance_id] += num_kept
    block_bytes = taker.info.identity.block_bytes(taker.block_tokens)
    state.counters[f"{move.tally.purpose}_blocks"] += num_kept
    state.counters[f"{move.tally.purpose}_bytes"] += num_kept * block_bytes
    state.counters["failed_moves"] += num_kept < len(reservation.hashes)
    source = state.instances.get(move.source)
    draining = None if source is None else source.draining
    if draining is not None and draining.tally is move.tally:
        draining.fail(taker.info.instance_id, reservation.hashes[num_kept:])


def num_wanted(state: ServiceState, source: Instance) -> int:
    """Count the blocks that others are going to pull from an instance."""
    return sum(
        len(hashes)
        for taker in state.instances.values()
        for (source_id, _), hashes in taker.wanted.items()
        if source_id == source.info.instance_id
    )


def num_moving(taker: Instance) -> int:
    """Count the blocks that moves are filling; they can be had when these have ended."""
    return sum(len(one.hashes) for one in taker.reservations.values() if one.move is not None)


def moves_from(state: ServiceState, source: Instance) -> Iterator[Reservation]:
    """Yield the moves in flight from an instance whose lease still lives."""
    for taker in state.instances.values():
        for reservation in taker.reservations.values():
            move = reservation.move
            if move is None or move.source != source.info.instance_id:
                continue
            if state.leases.get(move.lease_id) is not None:
                yield reservation


def cache_moved(taker: Instance, reservation: Reservation, num_written: int) -> None:
    """Make the first blocks of a move findable, told chain by chain."""
    assert reservation.move is not None
    parents = reservation.move.parents
    start = 0
    for end in range(1, num_written + 1):
        if end < num_written and parents[end] == reservation.hashes[end - 1]:
            continue
        _cache_chain(taker, reservation, parents[start], range(start, end))
        start = end


def _cache_chain(
    taker: Instance, reservation: Reservation, parent: BlockHash | None, run: range
) -> None:
    hashes = list(reservation.hashes[run.start : run.stop])
    blocks = [block for block in reservation.block_ids[run.start : run.stop] if block is not None]
    num_before = 0
    if parent is not None:
        hashes, blocks, num_before = [parent, *hashes], [NULL_BLOCK, *blocks], 1
    taker.manager.pool.cache_full_blocks(
        hashes,
        blocks,
        num_before,
        len(hashes),
        reservation.group_id,
        block_tokens=taker.block_tokens,
        origin=taker.manager.groups[reservation.group_id].origin,
    )


def _begun_moves(state: ServiceState, taker: Instance, now: float) -> Iterator[Move]:
    """Yield the moves in flight whose source is still leased."""
    for reservation_id, reservation in taker.reservations.items():
        move = reservation.move
        if move is not None and (lease := state.leases.get(move.lease_id)) is not None:
            source = state.instances[move.source]
            yield _order(source, reservation_id, reservation, lease, now)


def _next_move(state: ServiceState, taker: Instance, now: float) -> Move | None:
    block_bytes = taker.info.identity.block_bytes(taker.block_tokens)
    spare = taker.manager.pool.num_free_blocks - left_free(taker)
    limit = min(max(MAX_MOVE_BYTES // block_bytes, 1), spare)
    while limit > 0 and (key := _most_wanted(state, taker)):
        source = state.instances[key[0]]
        batch = _take_wanted(taker, source, key[1], limit)
        if batch.found:
            return _begin(state, taker, batch, now)
    return None


def _most_wanted(state: ServiceState, taker: Instance) -> tuple[InstanceId, GroupId] | None:
    """Return of whom, and of which group, most is wanted; of nobody who is not heard now."""
    keys = [key for key in taker.wanted if not state.instances[key[0]].is_suspect]
    return max(keys, key=lambda key: len(taker.wanted[key]), default=None)


def _take_wanted(taker: Instance, source: Instance, group_id: GroupId, limit: int) -> _Batch:
    """Take up to `limit` of the hashes that the source has and the taker lacks; with its blocks."""
    key = source.info.instance_id, group_id
    wanted, found = taker.wanted[key], dict[BlockHash, BlockId]()
    while wanted and len(found) < limit:
        block_hash = wanted.popleft()
        block = source.manager.pool.get_cached_block(block_hash, group_id)
        if block is None or taker.manager.pool.get_cached_block(block_hash, group_id) is not None:
            continue
        found[block_hash] = block
    if not wanted:
        del taker.wanted[key]
    return _Batch(source, group_id, found)


def _begin(state: ServiceState, taker: Instance, batch: _Batch, now: float) -> Move:
    source, group_id, found = batch
    tally = _tally(taker, source)
    parents = tuple(map(source.manager.pool.parent_of, found.values()))
    lease = state.lease_blocks(
        source,
        tuple(found.values()),
        num_prefix_hashes=len(found) * source.hashes_per_block,
        now=now,
        ttl_s=MOVE_TTL_S,
        beneficiary=taker.info.instance_id,
    )
    block_ids = tuple(taker.manager.pool.get_new_blocks(len(found)))
    reservation = Reservation(
        group_id=group_id,
        hashes=tuple(found),
        block_ids=block_ids,
        kept=(),
        num_resets=taker.num_resets,
        deadline_s=now + state.leases.cap_s,
        move=MoveInFlight(
            source=source.info.instance_id,
            lease_id=lease.lease_id,
            parents=parents,
            tally=tally,
        ),
    )
    reservation_id = state.add_reservation(taker, reservation)
    return _order(source, reservation_id, reservation, lease, now)


def _order(
    source: Instance, reservation_id: LeaseId, reservation: Reservation, lease: Lease, now: float
) -> Move:
    return Move(
        reservation_id=reservation_id,
        group_id=reservation.group_id,
        hashes=reservation.hashes,
        block_ids=tuple(block for block in reservation.block_ids if block is not None),
        source=source.source,
        lease_id=lease.lease_id,
        ttl_s=lease.deadline_s - now,
        num_resets=reservation.num_resets,
    )


def _tally(taker: Instance, source: Instance) -> Tally:
    cause = taker.warming if source.draining is None else source.draining
    if cause is None:
        raise InvariantError("a move for nobody", given=taker.info.instance_id)
    return cause.tally
