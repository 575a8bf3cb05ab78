"""Cross attention: one allocation for the encoder's tokens, shared with nobody."""

from collections.abc import Sequence

from kvferry.coordinator.managers.base import GroupHits, GroupManager, SlotAsk
from kvferry.coordinator.refusals import call_refused
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError, InvariantError
from kvferry.proto.ids import BlockHash, BlockId, GroupId


class CrossManager(GroupManager):
    """Counts and grants by encoder tokens; nothing of it can be looked up."""

    def find_longest_hit(
        self,
        hashes: Sequence[BlockHash],
        max_tokens: int,
        group_ids: Sequence[GroupId],
        *,
        drop: bool,
    ) -> GroupHits:
        """Refuse: encoder states belong to one request.

        Raises:
            BadInputError: always.

        """
        raise self._no_caching()

    def count_blocks_to_allocate(self, ask: SlotAsk, computed: Sequence[BlockId]) -> int:
        """Return how many free blocks the encoder's tokens use up."""
        return super().count_blocks_to_allocate(self._of_encoder(ask), ())

    def adopt_computed(self, ask: SlotAsk, computed: Sequence[BlockId]) -> None:
        """Do nothing: there are no hits.

        Raises:
            InvariantError: hits are given.

        """
        if computed:
            raise InvariantError("hits for a cross-attention group", given=ask.request_id)

    def extend_for_external(self, ask: SlotAsk) -> None:
        """Do nothing: external tokens are the decoder's."""

    def extend(self, ask: SlotAsk) -> list[BlockId]:
        """Grow a table to the encoder's tokens and return the blocks added."""
        return super().extend(self._of_encoder(ask))

    def cache_blocks(
        self, request: RequestState, num_tokens: int, resume_at: tuple[int, ...]
    ) -> None:
        """Refuse: nothing is shared between requests.

        Raises:
            BadInputError: always.

        """
        raise self._no_caching()

    def _of_encoder(self, ask: SlotAsk) -> SlotAsk:
        return ask._replace(
            local_tokens=0,
            computed_tokens=0,
            main_tokens=ask.encoder_tokens,
            slot_tokens=ask.encoder_tokens,
        )

    def _no_caching(self) -> BadInputError:
        return call_refused(
            "cross_attention_lookup",
            "cross-attention groups have no prefix cache",
            allowed="enable_caching = False",
            group=self.group_id,
        )
