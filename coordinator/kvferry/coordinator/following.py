"""Requests whose prompt a prefill instance computes meanwhile: its chunks are loaded ahead.

A follower is not admitted and holds no blocks, except those that a load is writing. What a load
has brought can be found like anything else in the pool.
"""

from kvferry.coordinator.admission import Admission
from kvferry.coordinator.handoff import HandoffState
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import StepOutcome
from kvferry.proto.ids import RequestId

# Loads of admitted requests should not queue behind many of those that are not.
_MAX_LOADS_AHEAD = 2


def end_waits(state: ServiceState, instance: Instance, outcome: StepOutcome) -> None:
    """Let the followers go whose prefill is over, however it ended, and whose load has ended."""
    for request_id in list(instance.followers):
        if request_id in instance.loads or _written_tokens(state, instance, request_id) is not None:
            continue
        del instance.followers[request_id]
        outcome.prefill_over.append(request_id)


def load_ahead(admission: Admission) -> None:
    """Load what the prefills of an instance's followers have written since the last time."""
    state, instance = admission.state, admission.instance
    num_loads = sum(load.ahead for load in instance.loads.values())
    for request_id, follower in instance.followers.items():
        if num_loads >= _MAX_LOADS_AHEAD:
            return
        written = _written_tokens(state, instance, request_id)
        if written is None or request_id in instance.loads or not follower.may_load:
            continue
        looked_at = follower.looked_at_tokens
        block_tokens = instance.block_tokens
        if looked_at is not None and written // block_tokens <= looked_at // block_tokens:
            continue
        if admission.load_ahead(follower.ask):
            follower.looked_at_tokens = written
        num_loads += request_id in instance.loads


def _written_tokens(state: ServiceState, instance: Instance, request_id: RequestId) -> int | None:
    """Return how much of a follower's prompt its prefill has written; None when that is over."""
    handoff = state.handoffs.get(request_id)
    if (
        handoff is None
        or handoff.decode_instance != instance.info.instance_id
        or handoff.state is not HandoffState.OPEN
    ):
        return None
    prefill = state.instance(handoff.prefill_instance).requests.get(request_id)
    return 0 if prefill is None else prefill.num_computed_tokens
