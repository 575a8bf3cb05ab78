"""The half of a connector that runs beside the engine's scheduler: what to load and what to save.

It never waits for the service. Requests are vLLM's own objects; of each it reads the id, the token
ids, what else its blocks depend on, and the transfer parameters.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.connectors.facts import EngineFacts
from kvferry.cluster.connectors.orders import EngineBlocks, LoadOrder, SaveOrder, StepOrders
from kvferry.cluster.connectors.prefixes import NOTHING, Prefix, Prefixes
from kvferry.cluster.connectors.tracked_request import Lookup, TrackedRequest
from kvferry.proto.errors import KvferryError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.step_messages import Source

_log = logging.getLogger(__name__)

HANDOFF_LEASE_S = 60.0
# How long a decode engine waits for blocks that a prefill engine said it is saving.
HANDOFF_WAIT_S = 10.0
HANDOFF_POLL_S = 0.02
IDLE_WAIT_S = 0.01

NUM_TOKENS_PARAM = "kvferry_num_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A request's part of one step.

    `block_ids` are new ones, or all of them where it `starts` (anew). `num_computed` tokens had
    their KV before the step, `num_tokens` get theirs in it.
    """

    request_id: str
    block_ids: Sequence[int]
    starts: bool
    num_computed: int
    num_tokens: int


class SchedulerHalf:
    """Called by the engine's scheduler only, one call at a time.

    Args:
        facts: the engine.
        service: answers about prefixes.
        keys_of: what a request's blocks depend on besides its tokens; None: it is not cached.
        store_address: where the engine's own store is now; None while there is none.
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        facts: EngineFacts,
        service: Prefixes,
        *,
        keys_of: Callable[[Any], RequestKeys | None],
        store_address: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._service = service
        self._keys_of = keys_of
        self._store_address = store_address
        self._clock = clock
        self._requests: dict[str, TrackedRequest] = {}
        self._local_tokens: dict[str, int] = {}
        self._loads: list[LoadOrder] = []
        self._saves: list[SaveOrder] = []
        self._held: set[str] = set()
        self._cancelled: set[str] = set()
        self._overwritten: set[int] = set()
        self._is_reset = False
        self._is_waiting = False
        self.engine: Source | None = None
        # As vLLM counts its external cache: of requests that were never preempted, in tokens.
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the engine's own can be loaded; None: ask again later."""
        self._local_tokens[request.request_id] = num_local_tokens
        tracked = self._track(request)
        if tracked is None or tracked.has_failed or tracked.is_loading:
            return 0
        if self._is_reset:
            # What ranks saved before they hear of it is found until then, and forgotten after that.
            return 0
        prefix = self._prefix(tracked)
        wanted = self._usable_tokens(tracked, tracked.num_tokens)
        if request.skip_reading_prefix_cache or wanted <= num_local_tokens:
            return 0
        if prefix is None:
            self._is_waiting = True
            return None
        found = self._usable_tokens(tracked, prefix.num_blocks * self._facts.hash_block_tokens)
        if self._waits_for_prefill(tracked, found):
            self._is_waiting = True
            return None
        return max(found - num_local_tokens, 0)

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Take note of a request's blocks, and order what was promised into them."""
        local_tokens = self._local_tokens.pop(request.request_id, None)
        if local_tokens is None:
            # The second call for one allocation, after its load has ended.
            return
        if not request.num_preemptions:
            self._num_query_tokens += request.num_tokens - local_tokens
            self._num_hit_tokens += num_external_tokens
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(block_ids)
        if not num_external_tokens or tracked.prefix is None:
            return
        first_block, end_block = (
            tokens // self._facts.hash_block_tokens
            for tokens in (local_tokens, local_tokens + num_external_tokens)
        )
        blocks = self._blocks_of(tracked, first_block, end_block)
        self._overwritten.update(blocks.ids)
        self._loads.append(
            LoadOrder(
                request_id=request.request_id,
                first_block=first_block,
                end_block=end_block,
                chain=tracked.hashes(),
                blocks=blocks,
                holders=tracked.prefix.holders,
            )
        )
        tracked.is_loading = True

    def step(self, scheduled: Iterable[Scheduled], *, is_idle: bool) -> StepOrders:
        """Return this step's orders; what it returned is forgotten here."""
        for one in scheduled:
            self._note(one)
        if is_idle and self._is_waiting:
            # Nothing else is to be done: the answer comes sooner if its thread may run.
            self._service.wait_answered(IDLE_WAIT_S)
        orders = StepOrders(
            saves=tuple(self._saves),
            loads=tuple(self._loads),
            cancelled=frozenset(self._cancelled),
            held=frozenset(self._held),
            overwritten=frozenset(self._overwritten),
            engine=self.engine,
            store_address=self._store_address(),
            is_idle=is_idle,
            is_reset=self._is_reset,
        )
        for done in (self._saves, self._loads, self._cancelled, self._held, self._overwritten):
            done.clear()
        self._is_reset = self._is_waiting = False
        return orders

    def loaded(self, request_ids: Sequence[str], failed_ids: frozenset[int]) -> None:
        """Take note of loads that ended, and of the blocks they left without their content.

        A rank's failed blocks may come before the other ranks have ended the load.
        """
        for tracked in self._requests.values():
            if tracked.is_loading and not failed_ids.isdisjoint(tracked.block_ids):
                tracked.has_failed = True
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests[request_id].is_loading = False

    def finished(
        self, request: Any, num_computed_tokens: int, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the engine must keep the blocks until they are reported as saved.

        And what is to be said to whoever goes on with the request elsewhere.
        """
        self._local_tokens.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        if tracked.is_loading:
            # The engine itself keeps the blocks until the load is reported as ended.
            self._cancelled.add(request.request_id)
            return False, None
        tracked.block_ids = list(block_ids)
        if self._answer(tracked) is None:
            tracked.lookup = None
        num_blocks = self._save(tracked, num_computed_tokens)
        if tracked.has_saved:
            self._held.add(request.request_id)
        return tracked.has_saved, self._handoff(tracked, num_blocks)

    def reset(self) -> bool:
        """Forget what was saved of the identity, here and for every engine; False if that failed.

        Nothing is saved any more of requests that are here now.
        """
        self._is_reset = True
        self._saves.clear()
        for tracked in self._requests.values():
            tracked.may_save = False
            tracked.lookup = tracked.prefix = None
        return self._service.reset()

    @property
    def is_reset_pending(self) -> bool:
        """True until the next step, with which the ranks hear of a reset."""
        return self._is_reset

    def hit_counts(self) -> dict[str, int]:
        """Return what was looked for and promised so far."""
        return {
            "external_query_tokens": self._num_query_tokens,
            "external_hit_tokens": self._num_hit_tokens,
            "failed_lookups": self._service.num_failed,
        }

    def close(self) -> None:
        """Ask the service no more."""
        self._service.close()

    # ---------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> TrackedRequest | None:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            try:
                keys = self._keys_of(request)
            except KvferryError as error:
                _log.warning("request %s is not cached: %s", request.request_id, error)
                keys = None
            if keys is None:
                return None
            tracked = TrackedRequest.of(request, self._facts.scheme, keys)
            self._requests[request.request_id] = tracked
        return tracked

    def _prefix(self, tracked: TrackedRequest) -> Prefix | None:
        """Return what is held of the request's prefix; None until the answer is here."""
        if tracked.lookup is None or tracked.lookup.is_old(self._clock()):
            hashes = tracked.hashes()
            if not hashes:
                return NOTHING
            tracked.prefix = None
            tracked.lookup = Lookup(self._service.look_up(hashes), self._clock)
        return self._answer(tracked)

    def _answer(self, tracked: TrackedRequest) -> Prefix | None:
        """Return the answer to the last question, if it is here."""
        lookup = tracked.lookup
        if tracked.prefix is None and lookup is not None and lookup.answer.done():
            tracked.prefix = lookup.answer.result()
            tracked.num_saved = tracked.prefix.num_stored
        return tracked.prefix

    def _usable_tokens(self, tracked: TrackedRequest, num_tokens: int) -> int:
        """Return how many of the first tokens can be loaded: the last one is computed anyway."""
        unit = self._facts.engine_block_tokens
        return min(num_tokens, tracked.num_tokens - 1) // unit * unit

    def _waits_for_prefill(self, tracked: TrackedRequest, found: int) -> bool:
        """Return whether more is about to be saved by the engine that computed the prompt."""
        params: Mapping[str, Any] = tracked.request.kv_transfer_params or {}
        announced = params.get(NUM_TOKENS_PARAM)
        if not params.get("do_remote_prefill") or not isinstance(announced, int):
            return False
        if found >= self._usable_tokens(tracked, announced):
            return False
        if self._service.is_away:
            return False
        now_s = self._clock()
        if tracked.wanted_until_s is None:
            tracked.wanted_until_s = now_s + HANDOFF_WAIT_S
        if now_s >= tracked.wanted_until_s:
            return False
        if tracked.lookup is not None and now_s - tracked.lookup.asked_s >= HANDOFF_POLL_S:
            tracked.lookup = None
        return True

    def _note(self, scheduled: Scheduled) -> None:
        tracked = self._requests.get(scheduled.request_id)
        if tracked is None:
            self._overwritten.update(scheduled.block_ids)
            return
        if scheduled.starts:
            tracked.block_ids = list(scheduled.block_ids)
            first = scheduled.num_computed // self._facts.engine_block_tokens
            self._overwritten.update(tracked.block_ids[first:])
        else:
            tracked.block_ids.extend(scheduled.block_ids)
            self._overwritten.update(scheduled.block_ids)
        self._save(tracked, scheduled.num_computed + scheduled.num_tokens)

    def _save(self, tracked: TrackedRequest, num_computed_tokens: int) -> int:
        """Order what is complete and not saved; return the number of complete hash blocks.

        Nothing is ordered before it is known what the store has. Only tokens whose ids are known
        count: of placeholders and drafts nobody knows the hash.
        """
        size = self._facts.hash_block_tokens
        num_blocks = min(num_computed_tokens, tracked.num_tokens) // size
        is_known = tracked.lookup is None or self._answer(tracked) is not None
        if not tracked.may_save or not is_known or num_blocks <= tracked.num_saved:
            return num_blocks
        first_block, tracked.num_saved = tracked.num_saved, num_blocks
        tracked.has_saved = True
        self._saves.append(
            SaveOrder(
                request_id=tracked.request.request_id,
                first_block=first_block,
                hashes=tracked.hashes()[first_block:num_blocks],
                blocks=self._blocks_of(tracked, first_block, num_blocks),
            )
        )
        return num_blocks

    def _blocks_of(self, tracked: TrackedRequest, first_block: int, end_block: int) -> EngineBlocks:
        """Return the engine's blocks that hold hash blocks [first_block, end_block)."""
        size, engine_size = self._facts.hash_block_tokens, self._facts.engine_block_tokens
        first = first_block * size // engine_size
        end = -(-end_block * size // engine_size)
        return EngineBlocks(first=first, ids=tuple(tracked.block_ids[first:end]))

    def _handoff(self, tracked: TrackedRequest, num_blocks: int) -> dict[str, Any] | None:
        params: Mapping[str, Any] = tracked.request.kv_transfer_params or {}
        is_wanted = params.get("do_remote_decode") and num_blocks
        if not is_wanted or not tracked.may_save or self._store_address() is None:
            # Nobody is to wait for what is not being saved.
            return None
        self._service.keep_when_stored(tracked.hashes()[:num_blocks], HANDOFF_LEASE_S)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._facts.engine_id,
            NUM_TOKENS_PARAM: num_blocks * self._facts.hash_block_tokens,
        }
