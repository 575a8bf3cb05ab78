"""The handoff of one request from a prefill to a decode instance, as a state machine.

    OPEN ──blocks leased──► READY ──pull started──► PULLING ──finished──► DONE
                              ▲                        │
                              └─────pull cancelled─────┘
    every live state: finished ► DONE, failed ► FAILED, deadline ► EXPIRED

Knows no blocks and no clock; what a transition means for leases is the service state's business.
"""

from dataclasses import dataclass
from enum import Enum

from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import InstanceId, LeaseId, RequestId


class HandoffState(Enum):
    """Where a handoff stands."""

    OPEN = "open"
    READY = "ready"
    PULLING = "pulling"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


class HandoffEvent(Enum):
    """What can happen to a handoff."""

    BLOCKS_LEASED = "blocks leased"
    PULL_STARTED = "pull started"
    PULL_CANCELLED = "pull cancelled"
    FINISHED = "finished"
    FAILED = "failed"
    DEADLINE = "deadline"


LIVE_STATES = (HandoffState.OPEN, HandoffState.READY, HandoffState.PULLING)

TRANSITIONS: dict[tuple[HandoffState, HandoffEvent], HandoffState] = {
    (HandoffState.OPEN, HandoffEvent.BLOCKS_LEASED): HandoffState.READY,
    (HandoffState.READY, HandoffEvent.PULL_STARTED): HandoffState.PULLING,
    (HandoffState.PULLING, HandoffEvent.PULL_CANCELLED): HandoffState.READY,
    **{(state, HandoffEvent.FINISHED): HandoffState.DONE for state in LIVE_STATES},
    **{(state, HandoffEvent.FAILED): HandoffState.FAILED for state in LIVE_STATES},
    **{(state, HandoffEvent.DEADLINE): HandoffState.EXPIRED for state in LIVE_STATES},
}


@dataclass(slots=True, kw_only=True)
class Handoff:
    """One request's way from `prefill_instance` to `decode_instance`, until `deadline_s`."""

    request_id: RequestId
    prefill_instance: InstanceId
    decode_instance: InstanceId
    deadline_s: float
    state: HandoffState = HandoffState.OPEN
    lease_id: LeaseId | None = None

    @property
    def is_live(self) -> bool:
        """Tell whether anything can still happen."""
        return self.state in LIVE_STATES

    def can(self, event: HandoffEvent) -> bool:
        """Tell whether an event is allowed now."""
        return (self.state, event) in TRANSITIONS

    def apply(self, event: HandoffEvent) -> None:
        """Move on.

        Raises:
            InvariantError: the event is not allowed in this state; naming both.

        """
        if not self.can(event):
            raise InvariantError(
                f"handoff of {self.request_id} cannot move on",
                given={"state": self.state.value, "event": event.value},
                allowed=[e.value for s, e in TRANSITIONS if s is self.state],
            )
        self.state = TRANSITIONS[self.state, event]
