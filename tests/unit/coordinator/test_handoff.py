"""The handoff state machine, every state with every event."""

import pytest

from kvferry.coordinator.handoff import LIVE_STATES, Handoff, HandoffEvent, HandoffState
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import InstanceId, RequestId

S, E = HandoffState, HandoffEvent
ALLOWED = {
    (S.OPEN, E.BLOCKS_LEASED): S.READY,
    (S.OPEN, E.FINISHED): S.DONE,
    (S.OPEN, E.FAILED): S.FAILED,
    (S.OPEN, E.DEADLINE): S.EXPIRED,
    (S.READY, E.PULL_STARTED): S.PULLING,
    (S.READY, E.FINISHED): S.DONE,
    (S.READY, E.FAILED): S.FAILED,
    (S.READY, E.DEADLINE): S.EXPIRED,
    (S.PULLING, E.PULL_CANCELLED): S.READY,
    (S.PULLING, E.FINISHED): S.DONE,
    (S.PULLING, E.FAILED): S.FAILED,
    (S.PULLING, E.DEADLINE): S.EXPIRED,
}


def handoff(state: HandoffState) -> Handoff:
    return Handoff(
        request_id=RequestId("r"),
        prefill_instance=InstanceId("p"),
        decode_instance=InstanceId("d"),
        deadline_s=1.0,
        state=state,
    )


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_each_event_moves_on_or_is_refused(state: HandoffState, event: HandoffEvent) -> None:
    moved = handoff(state)
    if (state, event) in ALLOWED:
        assert moved.can(event)
        moved.apply(event)
        assert moved.state is ALLOWED[state, event]
    else:
        assert not moved.can(event)
        with pytest.raises(InvariantError, match=f"state={state.value}, event={event.value}"):
            moved.apply(event)
        assert moved.state is state


def test_three_states_are_live() -> None:
    assert [state for state in S if handoff(state).is_live] == [S.OPEN, S.READY, S.PULLING]
    assert LIVE_STATES == (S.OPEN, S.READY, S.PULLING)
