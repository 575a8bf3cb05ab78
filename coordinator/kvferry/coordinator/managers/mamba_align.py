"""Recurrent layers that keep states only where computing stopped (mode "align").

A request has one running state and blocks for the states of draft tokens, at the end of its table;
positions before are null but for the state it continues from. As the request grows, the blocks of
draft tokens move along, and the state of two steps ago is given back.
"""

from collections.abc import Sequence

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import SlotAsk
from kvferry.coordinator.managers.mamba import MambaManager
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockId, GroupId, RequestId


class MambaAlignManager(MambaManager):
    """Never counts a drafter's lookahead: draft models have no such layers."""

    def __init__(self, pool: BlockPool, config: CacheConfig, group_id: GroupId) -> None:
        super().__init__(pool, config, group_id)
        self._with_drafter = config.use_eagle
        self._granted: set[RequestId] = set()
        self._last_state: dict[RequestId, int] = {}
        self._num_retired: dict[RequestId, int] = {}

    def _count(self, ask: SlotAsk, computed: Sequence[BlockId]) -> int:
        required = self._required_blocks(ask)
        new = required - len(computed) - len(self._tables.get(ask.request_id, ()))
        copies = self._ends_inside(ask, computed) or ask.request_id in self._to_copy
        if copies:
            new = max(new, 0) + 1
        most = 1 + copies
        if ask.request_id not in self._granted:
            most += self.num_speculative
        return min(max(new, 0), most) + self.pool.num_free_of(computed)

    def extend(self, ask: SlotAsk) -> list[BlockId]:
        """Move the running state to where the step ends; returns what the table gained.

        What it gained may be null blocks and moved ones; a copy of a shared block comes first.

        Raises:
            InvariantError: more blocks are needed than were counted.

        """
        table = self._tables.setdefault(ask.request_id, [])
        required, before = self._required_blocks(ask), len(table)
        to_copy = self._to_copy.get(ask.request_id)
        was_granted = ask.request_id in self._granted
        if required <= before and to_copy is None:
            if self.rules.retires_by_position:
                self._granted.add(ask.request_id)
            return []
        if was_granted:
            self._last_state[ask.request_id] = before - 1 - self.num_speculative
        elif before:
            self._last_state[ask.request_id] = before - 1
        num_skipped = required - self.num_speculative - 1
        table += [NULL_BLOCK] * (num_skipped - before)
        if was_granted:
            self._move_speculative(table, before, num_skipped)
        missing = max(required - len(table), 0) + (to_copy is not None)
        if missing > 1 + (to_copy is not None) + (0 if was_granted else self.num_speculative):
            raise InvariantError("more states than were counted", given=missing)
        new = self.pool.get_new_blocks(missing)
        gained = table[before:]
        if to_copy is not None:
            gained = self._copy(ask.request_id, to_copy, new.pop(0), was_granted, gained)
        table += new
        self._granted.add(ask.request_id)
        return gained + new

    def remove_skipped(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Give back the states before the last computed token's, and that of two steps ago."""
        super().remove_skipped(request_id, num_computed_tokens)
        if not self.rules.retires_by_position:
            num_computed_tokens = max(0, num_computed_tokens - self.num_speculative)
        position = self._last_state.get(request_id)
        if position is None or position >= -(-num_computed_tokens // self.block_tokens) - 1:
            return
        table = self._tables[request_id]
        if table[position] != NULL_BLOCK:
            self.pool.free_blocks((table[position],))
            table[position] = NULL_BLOCK

    def cache_blocks(
        self, request: RequestState, num_tokens: int, resume_at: tuple[int, ...]
    ) -> None:
        """Make states findable at block ends and at the last hash within the prompt."""
        super().cache_blocks(request, num_tokens, resume_at)
        if self.rules.caches_reachable_only:
            self._cache_prompt_end(request, num_tokens)

    def free(self, request_id: RequestId) -> None:
        """Give a request's blocks back, the last first. An unknown request is no error."""
        self._granted.discard(request_id)
        self._last_state.pop(request_id, None)
        self._num_retired.pop(request_id, None)
        super().free(request_id)

    def _required_blocks(self, ask: SlotAsk) -> int:
        return -(-ask.main_tokens // self.block_tokens) + self.num_speculative

    def _move_speculative(self, table: list[BlockId], before: int, num_skipped: int) -> None:
        """Move the blocks of draft tokens that the running state leaves behind to the end."""
        for position in range(before - self.num_speculative, min(before, num_skipped)):
            table.append(table[position])
            table[position] = NULL_BLOCK

    def _copy(
        self,
        request_id: RequestId,
        to_copy: tuple[int, BlockId],
        copy: BlockId,
        was_granted: bool,
        gained: list[BlockId],
    ) -> list[BlockId]:
        """Separate what others find from what this request writes; returns what it gained."""
        del self._to_copy[request_id]
        position, source = to_copy
        if not was_granted:
            self._redirect(request_id, position, copy)
            return [copy, *gained]
        # The engine has this request's table already, so the request stays on its block and the
        # copy is what others find. It is written by this step's copying only.
        self.pool.move_keys(source, copy)
        self.pool.touch((source,))
        self._copies.append((source, copy))
        key = self.pool.key_of(copy)
        if key is not None:
            self._keys_of_step.add(key)
        return gained

    def _cache_prompt_end(self, request: RequestState, num_tokens: int) -> None:
        if num_tokens <= 0 or num_tokens != self._prompt_end(request):
            return
        position = -(-num_tokens // self.block_tokens) - 1
        table = self._tables.get(request.request_id, ())
        if position >= len(table) or table[position] == NULL_BLOCK:
            return
        self._keys_of_step.add(self._cache_inside(request, position, num_tokens))
        if num_tokens % self.block_tokens:
            # The next step overwrites this state, so it is copied before.
            self._to_copy[request.request_id] = (position, table[position])
            self._num_cached[request.request_id] = position

    def _prompt_end(self, request: RequestState) -> int:
        """Return where the same prompt would resume, in whole hashes."""
        unit = self._hash_tokens
        if self._with_drafter:
            return request.num_prompt_tokens // unit * unit - unit
        return (request.num_prompt_tokens - 1) // unit * unit

    def _retire(self, request_id: RequestId, num_skipped: int) -> None:
        if not self.rules.retires_by_position:
            super()._retire(request_id, num_skipped)
            return
        table = self._tables.get(request_id, [])
        first = self._num_retired.get(request_id, 0)
        last = min(num_skipped, len(table))
        if first >= last:
            return
        self.pool.free_blocks(reversed(table[first:last]))
        table[first:last] = [NULL_BLOCK] * (last - first)
        self._num_retired[request_id] = last
