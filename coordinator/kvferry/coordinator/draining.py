"""Drains: how one begins, how far it is, and when the instance goes."""

from collections import deque

from kvferry.coordinator.drain_plan import is_planned, plan_some
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.leases import require_ttl
from kvferry.coordinator.moves import Draining, Tally
from kvferry.coordinator.moving import moves_from, num_wanted
from kvferry.coordinator.state import ServiceState
from kvferry.proto.drain_messages import Drain, Drained, Moved
from kvferry.proto.errors import BusyError, DrainedError, RestoringError, StaleError
from kvferry.proto.messages import InstanceInfo

# Who waits for the end of a drain asks every 0.2 s, and who was drained hears of it when it is next
# heard, within seconds as long as it lives.
_REMEMBERED_DRAINS = 1024


def drain(state: ServiceState, command: Drain, now: float) -> Drained:
    """Begin a drain, or tell how far it is.

    Raises:
        BadInputError: the deadline is not a positive number of seconds.
        NotFoundError: no such instance.
        StaleError: another life of it was meant.
        RestoringError: it comes back, and what it has not told yet would be dropped.

    """
    require_ttl("deadline_s", command.deadline_s)
    over, meant = state.drained.get(command.instance_id), command.incarnation
    if over is not None and meant == over.incarnation:
        return over
    if over is not None and meant is None and command.instance_id not in state.instances:
        return over
    instance = state.instance(command.instance_id)
    if command.incarnation not in (None, instance.info.incarnation):
        raise StaleError(
            f"another incarnation of {command.instance_id} is registered",
            given=command.incarnation,
            allowed=instance.info.incarnation,
        )
    deadline_s = now + command.deadline_s
    if instance.draining is None:
        _require_all_told(instance)
        _begin(state, instance, deadline_s, now)
    draining = _draining(instance)
    draining.deadline_s = min(draining.deadline_s, deadline_s)
    return _report(state, instance, now, is_over=False)


def end_drains(state: ServiceState, now: float) -> bool:
    """Remove the instances whose drain has come to its end, or to its deadline.

    Return whether there was any.

    Args:
        state: of the whole service.
        now: seconds on the service's clock.

    """
    num_drains = state.counters["drains"]
    for instance in list(state.draining.values()):
        # Peers let it be planned when they ask; there may be none.
        plan_some(state, instance, _draining(instance))
        is_late = _draining(instance).deadline_s <= now
        if not is_late and not _is_empty(state, instance):
            continue
        instance_id = instance.info.instance_id
        report = _report(state, instance, now, is_over=True)
        state.drained.pop(instance_id, None)
        state.drained[instance_id] = report
        if len(state.drained) > _REMEMBERED_DRAINS:
            del state.drained[next(iter(state.drained))]
        state.remove_instance(instance_id)
        state.counters["drains"] += 1
        num_moved = sum(moved.num_blocks for moved in report.moved)
        num_bytes = sum(moved.num_bytes for moved in report.moved)
        state.note(
            "instance_drained",
            f"{instance_id}: moved {num_moved} blocks ({num_bytes} bytes) and dropped "
            f"{report.num_dropped} in {report.seconds:.1f} s",
        )
    return state.counters["drains"] > num_drains


def require_not_draining(instance: Instance) -> None:
    """Refuse new work for an instance that is going.

    Raises:
        BusyError: it is being drained.

    """
    if instance.draining is not None:
        raise BusyError("the instance is being drained", given=instance.info.instance_id)


def require_not_drained(state: ServiceState, info: InstanceInfo) -> None:
    """Refuse a life of an instance that was drained.

    Raises:
        DrainedError: a new process of it would be let in.

    """
    over = state.drained.get(info.instance_id)
    if over is not None and info.incarnation <= over.incarnation:
        raise DrainedError(
            f"{info.instance_id} was drained",
            given=info.incarnation,
            allowed=f"an incarnation above {over.incarnation}",
        )


def _require_all_told(instance: Instance) -> None:
    if instance.returning_as is not None:
        raise RestoringError(
            "an instance can be drained once it has told all that it holds",
            given=instance.info.instance_id,
        )


def _begin(state: ServiceState, instance: Instance, deadline_s: float, now: float) -> None:
    pool = instance.manager.pool
    instance.wanted, instance.warming = {}, None
    instance.draining = Draining(
        deadline_s=deadline_s,
        num_cached_blocks=pool.num_cached_blocks,
        left=deque(pool.hottest_first()),
        tally=Tally(purpose="drained", started_s=now),
    )
    state.draining[instance.info.instance_id] = instance
    state.note("drain_began", f"{instance.info.instance_id}: {pool.num_cached_blocks} blocks")


def _draining(instance: Instance) -> Draining:
    assert instance.draining is not None
    return instance.draining


def _is_empty(state: ServiceState, instance: Instance) -> bool:
    """Tell whether all that can move has moved, and nobody uses what is left."""
    instance_id = instance.info.instance_id
    return not (
        not is_planned(state, instance, _draining(instance))
        or instance.requests
        or instance.followers
        or instance.reservations
        or num_wanted(state, instance)
        or any(lease.instance_id == instance_id for lease in state.leases.live())
    )


def _report(state: ServiceState, instance: Instance, now: float, *, is_over: bool) -> Drained:
    draining = _draining(instance)
    block_bytes = instance.info.identity.block_bytes(instance.block_tokens)
    moved = draining.tally.num_blocks
    in_flight = sum(len(one.hashes) for one in moves_from(state, instance))
    return Drained(
        instance_id=instance.info.instance_id,
        incarnation=instance.info.incarnation,
        is_over=is_over,
        seconds=now - draining.tally.started_s,
        num_cached_blocks=draining.num_cached_blocks,
        moved=tuple(
            Moved(instance_id=peer, num_blocks=num, num_bytes=num * block_bytes)
            for peer, num in sorted(moved.items())
            if num
        ),
        num_elsewhere=sum(draining.elsewhere.values()),
        num_waiting=0 if is_over else num_wanted(state, instance) + in_flight,
        num_dropped=state.index.num_only_at(instance.info.instance_id) if is_over else 0,
        num_requests=instance.num_requests,
    )
