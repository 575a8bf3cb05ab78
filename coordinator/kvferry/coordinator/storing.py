"""Reservations: destination blocks for content that a client is about to store."""

import math
from collections.abc import Iterable

from kvferry.coordinator.instances import Instance, Reservation
from kvferry.coordinator.moving import cache_moved, end_move
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_checks import check_written
from kvferry.proto.errors import BadInputError, BusyError, NeverFitsError, NotFoundError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, runs_of_reserved
from kvferry.proto.messages import Done, EndReservation, Reserve, Reserved
from kvferry.proto.step_messages import MoveEnd


def reserve(state: ServiceState, instance: Instance, command: Reserve, *, now: float) -> Reserved:
    """Reserve a block for every hash the instance does not hold, and keep those it holds.

    For as long as a lease may live: no call that writes takes longer.

    Raises:
        BadInputError: the instance has no such group, or its blocks are no hash blocks of one rank:
            whoever writes one hash at one rank would not write a whole block.
        NeverFitsError: more hashes than the pool has blocks.
        BusyError: not enough free blocks now. Nothing has changed in all cases.

    """
    layout = instance.info.layout
    if instance.hashes_per_block != 1 or layout.num_ranks != 1:
        raise BadInputError(
            f"{instance.info.instance_id} takes no single hash blocks",
            given={"hashes_per_block": instance.hashes_per_block, "num_ranks": layout.num_ranks},
            allowed={"hashes_per_block": 1, "num_ranks": 1},
        )
    if not 0 <= command.group_id < len(instance.rules):
        raise BadInputError(
            f"{instance.info.instance_id} has no such group",
            given=command.group_id,
            allowed=f"0 to {len(instance.rules) - 1}",
        )
    pool = instance.manager.pool
    if len(command.hashes) > instance.num_usable_blocks:
        raise NeverFitsError(
            f"reservation at {instance.info.instance_id}",
            given={
                "needed_blocks": len(command.hashes),
                "have_blocks": instance.num_usable_blocks,
            },
        )
    kept: list[BlockId] = []
    missing: dict[BlockHash, BlockId | None] = {}
    for block_hash in dict.fromkeys(command.hashes):
        held = pool.get_cached_block(block_hash, command.group_id)
        if held is None:
            missing[block_hash] = None
        else:
            kept.append(held)
    have = pool.num_free_blocks - pool.num_free_of(kept)
    if len(missing) > have:
        raise BusyError(
            f"no room at {instance.info.instance_id}",
            given={"needed_blocks": len(missing), "free_blocks": have},
        )
    pool.touch(kept)
    missing.update(zip(missing, pool.get_new_blocks(len(missing)), strict=True))
    # A hash that is asked for twice gets its block once.
    block_ids = tuple(missing.pop(block_hash, None) for block_hash in command.hashes)
    reservation = Reservation(
        group_id=command.group_id,
        hashes=command.hashes,
        block_ids=block_ids,
        kept=tuple(kept),
        num_resets=instance.num_resets,
        deadline_s=now + state.leases.cap_s,
    )
    return Reserved(
        reservation_id=state.add_reservation(instance, reservation),
        block_ids=block_ids,
        num_resets=instance.num_resets,
    )


def expire_reservations(state: ServiceState, now: float) -> bool:
    """End what is past its deadline, nothing of it findable; tell whether there was anything."""
    if now < state.earliest_reservation_s:
        return False
    num_ended, state.earliest_reservation_s = 0, math.inf
    for instance in state.instances.values():
        for reservation_id, reservation in list(instance.reservations.items()):
            if reservation.deadline_s > now:
                state.earliest_reservation_s = min(
                    state.earliest_reservation_s, reservation.deadline_s
                )
                continue
            del instance.reservations[reservation_id]
            _give_back(instance, reservation)
            num_ended += 1
            end_move(state, instance, reservation, 0)
            state.note("reservation_expired", f"{reservation_id} at {instance.info.instance_id}")
    state.counters["expired_reservations"] += num_ended
    return num_ended > 0


def end_moves(state: ServiceState, instance: Instance, ends: Iterable[MoveEnd]) -> None:
    """Take in how an engine's moves ended; those that have expired meanwhile are counted only."""
    for end in ends:
        if end.reservation_id in instance.reservations:
            end_reservation(state, instance, end)
        else:
            state.counters["ignored_messages"] += 1


def end_reservation(
    state: ServiceState, instance: Instance, command: EndReservation | MoveEnd
) -> Done:
    """Make what was written findable, unless there was a reset, and give all blocks back.

    Raises:
        NotFoundError: no such reservation at this instance, or it has ended or expired.
        BadInputError: `num_written` is more than was reserved.

    """
    reservation = instance.reservations.get(command.reservation_id)
    if reservation is None:
        raise NotFoundError("unknown or ended reservation", given=command.reservation_id)
    check_written(instance, command)
    del instance.reservations[command.reservation_id]
    is_good = reservation.num_resets == instance.num_resets
    num_kept = command.num_written if is_good else 0
    if reservation.move is not None:
        cache_moved(instance, reservation, num_kept)
    else:
        _cache_stored(instance, reservation, num_kept)
    _give_back(instance, reservation)
    end_move(state, instance, reservation, num_kept)
    return Done(changed=is_good)


def _cache_stored(instance: Instance, reservation: Reservation, num_written: int) -> None:
    reserved = [NULL_BLOCK if block is None else block for block in reservation.block_ids]
    # Told run by run, every event is a piece of the chain with what came before it.
    for run in runs_of_reserved(reservation.block_ids[:num_written]):
        instance.manager.pool.cache_full_blocks(
            reservation.hashes,
            reserved,
            run.start,
            run.stop,
            reservation.group_id,
            block_tokens=instance.block_tokens,
            origin=instance.manager.groups[reservation.group_id].origin,
        )


def _give_back(instance: Instance, reservation: Reservation) -> None:
    reserved = [block for block in reservation.block_ids if block is not None]
    instance.manager.pool.free_blocks(reversed([*reservation.kept, *reserved]))
