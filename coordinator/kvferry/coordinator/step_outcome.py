"""What one step has decided so far."""

from dataclasses import dataclass, field

from kvferry.proto.ids import Epoch, RequestId
from kvferry.proto.messages import Load, Scheduled, StepReply


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Decisions of a step, and the tokens that may still be scheduled in it."""

    token_budget: int
    scheduled: list[Scheduled] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    cancel_loads: list[RequestId] = field(default_factory=list)

    def reply(self, epoch: Epoch, num_free_blocks: int) -> StepReply:
        """Return the decisions as the engine gets them."""
        return StepReply(
            epoch=epoch,
            scheduled=tuple(self.scheduled),
            loads=tuple(self.loads),
            preempted=tuple(self.preempted),
            cancel_loads=tuple(self.cancel_loads),
            num_free_blocks=num_free_blocks,
        )
