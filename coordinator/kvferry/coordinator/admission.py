"""Admits waiting requests: local hit first, then the longest prefix of a peer, then compute.

Requests that follow a prefill get the second of these ahead of their admission.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvferry.coordinator.handoff import HandoffEvent
from kvferry.coordinator.hit_finders import GroupBlocks
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.loading import Loading
from kvferry.coordinator.request_state import RequestState, known_content
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import left_free
from kvferry.proto.step_messages import AdmitAsk, Scheduled


class _Hit(NamedTuple):
    """A local prefix hit: its blocks per group, and its tokens."""

    blocks: GroupBlocks
    num_tokens: int


@dataclass(slots=True)
class Admission:
    """Admissions of one step.

    Args:
        loading: the loads of the step; what was admitted goes to its outcome.
        load_ttl_s: how long a load may take, and its sources are leased, in seconds.

    """

    loading: Loading
    load_ttl_s: float

    @property
    def state(self) -> ServiceState:
        """Of the whole service."""
        return self.loading.state

    @property
    def instance(self) -> Instance:
        """Whose step it is."""
        return self.loading.instance

    def admit(self, ask: AdmitAsk) -> bool:
        """Admit one request, or change nothing; return whether those behind it may be admitted.

        One that waits for blocks which are on their way here for another keeps nobody back.
        """
        request = _new_request(ask)
        hit = self._local_hit(ask, request)
        peer = self._better_peer(ask, hit) if ask.allow_remote else None
        if peer is None:
            return self._admit_compute(ask, request, hit)
        if self.loading.is_bringing(ask.hashes, hit.num_tokens, peer[1]):
            return True
        if not self._load(request, hit, *peer):
            return False
        self._count(ask, hit)
        self.state.move_decode_handoff(self.instance, ask.request_id, HandoffEvent.PULL_STARTED)
        return True

    def load_ahead(self, ask: AdmitAsk) -> bool:
        """Load what peers have of a prefix without admitting its request.

        Returns whether there is nothing else to be loaded now. When the pool is too full, or the
        blocks are on their way here for another request, nothing has changed.
        """
        request = _new_request(ask)
        hit = self._local_hit(ask, request)
        peer = self._better_peer(ask, hit)
        if peer is None:
            return True
        if self.loading.is_bringing(ask.hashes, hit.num_tokens, peer[1]):
            return False
        if not self._load(request, hit, *peer, ahead=True):
            return False
        self.instance.accounts.uncounted(ask.request_id)
        self.state.counters["loads_ahead"] += 1
        return True

    def _local_hit(self, ask: AdmitAsk, request: RequestState) -> _Hit:
        return _Hit(*self.instance.manager.get_computed_blocks(request, ask.target_tokens))

    def _better_peer(self, ask: AdmitAsk, hit: _Hit) -> tuple[Instance, int] | None:
        """Return the peer with the longest prefix, and its tokens, if the hit has fewer."""
        hash_tokens = self.instance.hash_block_tokens
        max_hashes = min(ask.num_tokens - 1, ask.target_tokens) // hash_tokens
        peer = self.state.best_peer(self.instance, ask.hashes, max_hashes)
        if peer is None or peer[1] * hash_tokens <= hit.num_tokens:
            return None
        return peer[0], peer[1] * hash_tokens

    def _admit_compute(self, ask: AdmitAsk, request: RequestState, hit: _Hit) -> bool:
        wanted = ask.target_tokens - hit.num_tokens
        outcome = self.loading.outcome
        num_new = min(wanted, outcome.token_budget)
        if wanted and not num_new:
            return False
        granted = outcome.grant(
            self.instance,
            request,
            num_new,
            reaches_target=num_new == wanted,
            hit_tokens=hit.num_tokens,
            hit_blocks=hit.blocks,
        )
        if granted is None:
            return False
        self._enter(request, hit)
        self._count(ask, hit)
        outcome.scheduled.append(
            Scheduled(
                request_id=ask.request_id,
                num_computed_tokens=hit.num_tokens,
                granted_tokens=granted[1],
                new_block_ids=self.instance.tables(ask.request_id),
                num_hit_blocks=hit.num_tokens // self.instance.block_tokens,
            )
        )
        self.state.move_decode_handoff(self.instance, ask.request_id, HandoffEvent.FINISHED)
        return True

    def _load(
        self,
        request: RequestState,
        hit: _Hit,
        holder: Instance,
        held_tokens: int,
        *,
        ahead: bool = False,
    ) -> bool:
        granted = self.instance.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit.num_tokens,
            new_computed_blocks=hit.blocks,
            num_external_computed_tokens=held_tokens - hit.num_tokens,
            delay_cache_blocks=True,
            reserved_blocks=left_free(self.instance) if ahead else 0,
        )
        if granted is None:
            return False
        self._enter(request, hit)
        self.loading.begin(request, holder, held_tokens, ttl_s=self.load_ttl_s, ahead=ahead)
        return True

    def _enter(self, request: RequestState, hit: _Hit) -> None:
        request.num_computed_tokens = hit.num_tokens
        self.instance.requests[request.request_id] = request

    def _count(self, ask: AdmitAsk, hit: _Hit) -> None:
        self.instance.accounts.admitted(
            ask.request_id,
            asked_tokens=ask.target_tokens,
            hit_tokens=hit.num_tokens,
            ahead_tokens=ask.ahead_tokens,
            resumed=ask.resumed,
        )


def _new_request(ask: AdmitAsk) -> RequestState:
    return RequestState(
        request_id=ask.request_id,
        num_tokens=ask.num_tokens,
        hashes=list(ask.hashes),
        num_preemptions=int(ask.resumed),
        content=known_content(ask.content),
    )
