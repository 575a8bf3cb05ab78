"""What one step has decided so far."""

from dataclasses import dataclass, field

from kvferry.coordinator.hit_finders import GroupBlocks
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.ids import RequestId
from kvferry.proto.step_messages import Load, Move, Scheduled, StepReply

_LEFT_FREE = 8


def left_free(instance: Instance) -> int:
    """Return how many blocks must stay free when something is done ahead of its time.

    Newcomers and growing requests should find blocks without anybody giving way.
    """
    return instance.num_usable_blocks // _LEFT_FREE


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Decisions of a step, and the tokens that may still be scheduled in it.

    `token_budget`: tokens that may still be scheduled. `max_ahead_tokens`: slots that the engine
    would like beyond what it can compute now.
    `failed_loads`: those in `preempted` that gave their blocks back because a load failed.
    """

    token_budget: int
    max_ahead_tokens: int = 0
    scheduled: list[Scheduled] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    failed_loads: set[RequestId] = field(default_factory=set)
    cancel_loads: list[RequestId] = field(default_factory=list)
    prefill_over: list[RequestId] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def grant(
        self,
        instance: Instance,
        request: RequestState,
        num_new_tokens: int,
        *,
        reaches_target: bool,
        hit_tokens: int = 0,
        hit_blocks: GroupBlocks | None = None,
    ) -> tuple[GroupBlocks, int] | None:
        """Grant slots for new tokens, and ahead of a reached target where blocks are plenty.

        Returns:
            The blocks added for new tokens per group, and up to which token there are slots; None
            when the pool is too full. Then nothing is granted.

        """
        start = request.num_computed_tokens + hit_tokens
        for num_ahead, num_left in self._choices(instance, reaches_target):
            new = instance.manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=hit_tokens,
                new_computed_blocks=hit_blocks,
                num_lookahead_tokens=num_ahead,
                delay_cache_blocks=True,
                reserved_blocks=num_left,
            )
            if new is not None:
                self.token_budget -= num_new_tokens
                return new, min(start + num_new_tokens + num_ahead, instance.manager.max_model_len)
        return None

    def _choices(self, instance: Instance, reaches_target: bool) -> tuple[tuple[int, int], ...]:
        """Return what to try: slots to grant ahead, and how many blocks must then be left."""
        if reaches_target and self.max_ahead_tokens:
            return (self.max_ahead_tokens, left_free(instance)), (0, 0)
        return ((0, 0),)

    def reply(self) -> StepReply:
        """Return the decisions as the engine gets them."""
        return StepReply(
            scheduled=tuple(self.scheduled),
            loads=tuple(self.loads),
            preempted=tuple(self.preempted),
            cancel_loads=tuple(self.cancel_loads),
            prefill_over=tuple(self.prefill_over),
            moves=tuple(self.moves),
        )
