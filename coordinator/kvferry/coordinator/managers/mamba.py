"""Recurrent layers: a block holds the state after its last token.

In modes "none" and "all" a request has a block per `block_tokens` tokens, and blocks for draft
tokens beyond; what differs between the two is the model's matter. `mamba_align.py` holds the
third mode.
"""

from collections.abc import Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import GroupHits, SlotAsk
from kvferry.coordinator.managers.copying import CopyingManager
from kvferry.coordinator.refusals import call_refused
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError, InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupedHash, GroupId, RequestId
from kvferry.proto.specs import MambaSpec


class MambaManager(CopyingManager):
    """A hit needs one state, the last one before its end."""

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        super().__init__(pool, config, group_id)
        spec = config.groups[group_id]
        if not isinstance(spec, MambaSpec):
            raise InvariantError("not a spec with a state", given=spec.kind)
        self.num_speculative = spec.speculative_blocks
        self._keys_of_step: set[GroupedHash] = set()

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens' states are of no use: all but the last computed one's."""
        return num_computed_tokens - 1

    def find_longest_hit(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        *,
        drop: bool,
    ) -> GroupHits:
        """Return the last cached state after null blocks; nothing is dropped for a drafter.

        Drafters have no such layers, so the state at a position is right for them, too.

        Raises:
            BadInputError: the group is dealt over several ranks.

        """
        if self.is_dealt:
            raise call_refused(
                "context_parallel_with_mamba",
                "mamba groups cannot be dealt over ranks in this profile",
                allowed="dcp = pcp = 1",
                group=self.group_id,
            )
        unit = min(self.block_tokens, self.alignment_tokens)
        view = self._view(hashes) if unit == self.block_tokens else hashes
        for number in range(min(max_tokens // unit, len(view)), 0, -1):
            num_tokens = number * unit
            if num_tokens % self.alignment_tokens:
                continue
            cached = self.pool.get_cached_in_groups(view[number - 1], group_ids)
            if cached is not None:
                skipped = [NULL_BLOCK] * ((num_tokens - 1) // self.block_tokens)
                return [[*skipped, block] for block in cached], num_tokens
        return [[] for _ in group_ids], 0

    def count_blocks_to_allocate(self, ask: SlotAsk, computed: Sequence[BlockId]) -> int:
        """Return how many free blocks are used up; more than there are for a state too new.

        A state that another request leaves in this very step is not there yet, so whoever hits it
        must wait for the next step.
        """
        if self._keys_of_step and computed and self._is_of_step(computed[-1]):
            return self.pool.num_blocks + 1
        return self._count(ask, computed)

    def extend(self, ask: SlotAsk) -> list[BlockId]:
        """Grow a table, with blocks for the states of draft tokens; returns the blocks added."""
        return super().extend(self._with_speculative(ask))

    def remove_skipped(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Give back the states before the last computed token's."""
        if not self.rules.retires_by_position:
            num_computed_tokens = max(0, num_computed_tokens - self.num_speculative)
        super().remove_skipped(request_id, num_computed_tokens)

    def cache_blocks(
        self, request: RequestState, num_tokens: int, resume_at: tuple[int, ...]
    ) -> None:
        """Make full blocks findable, from the next step on."""
        before = self._num_cached.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, resume_at)
        after = self._num_cached.get(request.request_id, 0)
        for block in self.table(request.request_id)[before:after]:
            key = self.pool.key_of(block)
            if key is not None:
                self._keys_of_step.add(key)

    def check_truncate(self, request_id: RequestId, num_tokens: int) -> None:
        """Refuse: a state cannot be rolled back.

        Raises:
            BadInputError: always, for a request that has blocks.

        """
        if self._tables.get(request_id):
            raise BadInputError(
                f"request {request_id} cannot be rolled back: its states cannot",
                given={"num_tokens": num_tokens, "group": self.group_id},
            )

    def start_step(self) -> None:
        """Take notice that the states indexed so far are written."""
        self._keys_of_step.clear()

    def _count(self, ask: SlotAsk, computed: Sequence[BlockId]) -> int:
        return super().count_blocks_to_allocate(self._with_speculative(ask), computed)

    def _with_speculative(self, ask: SlotAsk) -> SlotAsk:
        if not self.num_speculative:
            return ask
        extra = self.num_speculative * self.block_tokens
        return ask._replace(slot_tokens=ask.slot_tokens + extra)

    def _is_of_step(self, block: BlockId) -> bool:
        return self.pool.key_of(block) in self._keys_of_step

    def _reachable(
        self, request: RequestState, start: int, end: int, resume_at: tuple[int, ...]
    ) -> list[bool] | None:
        """Keep the states at segment ends and where a later request may resume."""
        interval = self._retention_interval
        if interval is None or 0 < interval < 2 * self.block_tokens:
            return None
        mask = [False] * (end - start)
        if interval:
            per_segment = interval // self.block_tokens
            mask = [(i + 1) % per_segment == 0 for i in range(start, end)]
        for boundary in resume_at:
            aligned = boundary // self.alignment_tokens * self.alignment_tokens
            position = aligned // self.block_tokens - 1
            if start <= position < end:
                mask[position - start] = True
        return mask
