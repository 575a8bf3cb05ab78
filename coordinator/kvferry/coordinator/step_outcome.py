"""What one step has decided so far."""

from dataclasses import dataclass, field

from kvferry.coordinator.instances import Instance
from kvferry.proto.ids import Epoch, RequestId
from kvferry.proto.step_messages import Load, Scheduled, StepReply

# Slots are granted ahead while more than this part of the pool is free (1 / 4): newcomers and
# growing requests must find blocks without anybody giving way.
_PLENTY = 4


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Decisions of a step, and the tokens that may still be scheduled in it.

    `max_ahead_tokens`: slots that the engine would like beyond what it can compute now.
    """

    token_budget: int
    max_ahead_tokens: int = 0
    scheduled: list[Scheduled] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    cancel_loads: list[RequestId] = field(default_factory=list)

    def ahead_tokens(self, instance: Instance) -> int:
        """Return how many slots to grant ahead: none when that could cost others their blocks."""
        plenty = instance.num_usable_blocks // _PLENTY
        return self.max_ahead_tokens if instance.manager.pool.num_free_blocks > plenty else 0

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
