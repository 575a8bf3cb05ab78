"""One engine step: reports, slots for running requests, admissions, loads ahead, moves.

The order is the contract of `step_messages.Step`. Blocks go to running requests first, in the
engine's order; a load never keeps a running request from growing for longer than its cancellation
takes.
"""

from dataclasses import dataclass, field

from kvferry.coordinator.admission import Admission
from kvferry.coordinator.following import end_waits, load_ahead
from kvferry.coordinator.handoff import HandoffEvent
from kvferry.coordinator.hit_finders import GroupBlocks
from kvferry.coordinator.instances import Follower, Instance, LoadInFlight
from kvferry.coordinator.loading import Loading
from kvferry.coordinator.moving import begin_moves, num_moving
from kvferry.coordinator.request_state import RequestState
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_checks import check_step
from kvferry.coordinator.step_outcome import StepOutcome
from kvferry.coordinator.storing import end_moves
from kvferry.proto.ids import RequestId
from kvferry.proto.step_messages import (
    Progress,
    Release,
    RunningAsk,
    Scheduled,
    Step,
    StepReply,
)


def apply_step(
    state: ServiceState, instance: Instance, step: Step, *, now: float, step_lease_s: float
) -> StepReply:
    """Execute a step of a live instance. Loads' sources are leased for `step_lease_s` seconds.

    Raises:
        BadInputError, NotFoundError, NeverFitsError, PromptTooLongError: as `check_step`; nothing
            has changed then.

    """
    check_step(instance, step)
    outcome = StepOutcome(token_budget=step.token_budget, max_ahead_tokens=step.ahead_tokens)
    loading = Loading(state, instance, outcome, now)
    failed_loads = loading.end(step.load_results)
    end_moves(state, instance, step.moves_ended)
    for progress in step.progress:
        _take_in(state, instance, progress)
    for release in step.releases:
        _release(state, instance, release, outcome, now)
    loading.go_on(failed_loads)
    for ask in step.follows:
        instance.followers[ask.request_id] = Follower(ask=ask)
    # What was reported is written: states among it may be hit from here on.
    instance.manager.start_step()
    running = _RunningGrants(state, instance, outcome)
    running.grant([ask for ask in step.running if instance.is_running(ask.request_id)])
    # Whoever gave way in this step must not lose its blocks to a newcomer.
    if not (outcome.preempted or outcome.cancel_loads or running.num_promised):
        admission = Admission(loading, step_lease_s)
        if all(admission.admit(ask) for ask in step.waiting) or not outcome.token_budget:
            load_ahead(admission)
            outcome.moves += begin_moves(state, instance, now)
        else:
            _cancel_loads_ahead(state, instance, outcome)
    end_waits(state, instance, outcome)
    state.counters["preemptions"] += len(set(outcome.preempted) - outcome.failed_loads)
    return outcome.reply()


def _take_in(state: ServiceState, instance: Instance, progress: Progress) -> None:
    request = instance.requests.get(progress.request_id)
    if request is None:
        state.counters["ignored_messages"] += 1
        return
    request.num_tokens = progress.num_tokens
    request.hashes.extend(progress.new_hashes)
    if request.content is not None:
        request.content.tokens.extend(progress.new_tokens)
    request.num_computed_tokens = progress.num_computed_tokens
    instance.accounts.computed(progress.request_id, progress.num_computed_tokens)
    instance.manager.cache_blocks(request, progress.num_computed_tokens)


def _release(
    state: ServiceState, instance: Instance, release: Release, outcome: StepOutcome, now: float
) -> None:
    if release.request_id in outcome.preempted:
        # Its cancelled load ended in this very step: it has ended, and is not to be queued again.
        outcome.preempted.remove(release.request_id)
        return
    follower = instance.followers.pop(release.request_id, None)
    if follower is not None:
        state.move_decode_handoff(instance, release.request_id, HandoffEvent.FAILED)
    request = instance.requests.get(release.request_id)
    if request is None:
        state.counters["ignored_messages"] += follower is None
        return
    load = instance.loads.get(release.request_id)
    if load is not None:
        # A writer may still be open: the blocks come back with the load's result, not before.
        load.released = True
        _cancel_load(state, load, release.request_id, outcome)
        return
    if release.handoff:
        _lease_for_handoff(state, instance, request, now)
    else:
        _give_handoff_up(state, instance, release.request_id)
    instance.forget_request(release.request_id)


def _cancel_load(
    state: ServiceState, load: LoadInFlight, request_id: RequestId, outcome: StepOutcome
) -> None:
    if not load.cancelled:
        load.cancelled = True
        outcome.cancel_loads.append(request_id)
        state.counters["cancelled_loads"] += 1


def _cancel_loads_ahead(state: ServiceState, instance: Instance, outcome: StepOutcome) -> None:
    """Let requests that could run have the blocks that are being filled for others to run later."""
    for request_id, load in instance.loads.items():
        if load.ahead:
            _cancel_load(state, load, request_id, outcome)


def _give_handoff_up(state: ServiceState, instance: Instance, request_id: RequestId) -> None:
    """Tell who follows a prefill that has ended before it was done."""
    handoff = state.handoffs.get(request_id)
    if handoff is not None and handoff.prefill_instance == instance.info.instance_id:
        state.move_handoff(handoff, HandoffEvent.FAILED)


def _lease_for_handoff(
    state: ServiceState, instance: Instance, request: RequestState, now: float
) -> None:
    handoff = state.handoffs.get(request.request_id)
    if (
        handoff is None
        or handoff.prefill_instance != instance.info.instance_id
        or not handoff.can(HandoffEvent.BLOCKS_LEASED)
    ):
        state.counters["handoffs_without_taker"] += 1
        return
    num_full = request.num_computed_tokens // instance.block_tokens
    lease = state.lease_blocks(
        instance,
        tuple(instance.blocks_of(request.request_id, num_full)),
        num_prefix_hashes=num_full * instance.hashes_per_block,
        now=now,
        ttl_s=handoff.deadline_s - now,
        beneficiary=handoff.decode_instance,
    )
    handoff.lease_id = lease.lease_id
    state.move_handoff(handoff, HandoffEvent.BLOCKS_LEASED)


@dataclass(slots=True)
class _RunningGrants:
    """Grants slots to running requests, making room by cancelling loads, then by preemption."""

    state: ServiceState
    instance: Instance
    outcome: StepOutcome
    num_returning: int = field(init=False)
    num_promised: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Blocks that come back when the writers of cancelled loads, and of moves, are closed.
        self.num_returning = num_moving(self.instance) + sum(
            self._num_own_blocks(request_id)
            for request_id, load in self.instance.loads.items()
            if load.cancelled
        )

    def grant(self, asks: list[RunningAsk]) -> None:
        position, end = 0, len(asks)
        while position < end:
            missing = self._try(asks[position])
            if not missing or self._await_loads(missing):
                position += 1
                continue
            # The last one, which may be the one that asks: never one that was granted already.
            end -= 1
            self.instance.forget_request(asks[end].request_id)
            self.outcome.preempted.append(asks[end].request_id)

    def _try(self, ask: RunningAsk) -> int:
        """Schedule one ask within the budget; return how many blocks are missing."""
        request = self.instance.requests[ask.request_id]
        wanted = max(ask.target_tokens - request.num_computed_tokens, 0)
        num_new = min(wanted, self.outcome.token_budget)
        if wanted and not num_new:
            return 0
        blocks: GroupBlocks = tuple(() for _ in self.instance.rules)
        end = request.num_computed_tokens
        if num_new:
            granted = self.outcome.grant(
                self.instance, request, num_new, reaches_target=num_new == wanted
            )
            if granted is None:
                return self.instance.manager.count_missing_blocks(request, num_new)
            blocks, end = granted
        self.outcome.scheduled.append(
            Scheduled(
                request_id=ask.request_id,
                num_computed_tokens=request.num_computed_tokens,
                granted_tokens=end,
                new_block_ids=tuple([tuple(new) for new in blocks]),
            )
        )
        return 0

    def _await_loads(self, missing: int) -> bool:
        """Cancel loads until their blocks will do, those ahead first; tell whether they will."""
        loads = self.instance.loads
        order = list(reversed(loads))
        order.sort(key=lambda request_id: not loads[request_id].ahead)
        for request_id in order:
            if self.num_returning - self.num_promised >= missing:
                break
            if not loads[request_id].cancelled:
                self.num_returning += self._num_own_blocks(request_id)
                _cancel_load(self.state, loads[request_id], request_id, self.outcome)
        if self.num_returning - self.num_promised < missing:
            return False
        self.num_promised += missing
        return True

    def _num_own_blocks(self, request_id: RequestId) -> int:
        pool = self.instance.manager.pool
        return sum(pool.ref_count(block) == 1 for block in self.instance.blocks_of(request_id))
