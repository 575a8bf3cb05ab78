"""Admits waiting requests: local hit first, then the longest prefix of a peer, then compute."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.coordinator.handoff import HandoffEvent
from kvferry.coordinator.hit_finders import GroupBlocks
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.loading import Loading
from kvferry.coordinator.request_state import RequestState, known_content
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import StepOutcome
from kvferry.proto.step_messages import AdmitAsk, Scheduled


def admit_waiting(loading: Loading, waiting: Iterable[AdmitAsk], *, load_ttl_s: float) -> None:
    """Admit from the front until one does not fit the pool or the token budget.

    Args:
        loading: the loads of the step; what was admitted goes to its outcome.
        waiting: what the instance asks to admit, first to last.
        load_ttl_s: how long a load may take, and its sources are leased, in seconds.

    """
    admission = _Admission(loading.state, loading.instance, loading.outcome, loading, load_ttl_s)
    for ask in waiting:
        if not admission.admit(ask):
            return


class _Hit(NamedTuple):
    """A local prefix hit: its blocks per group, and its tokens."""

    blocks: GroupBlocks
    num_tokens: int


@dataclass(slots=True)
class _Admission:
    state: ServiceState
    instance: Instance
    outcome: StepOutcome
    loading: Loading
    load_ttl_s: float

    def admit(self, ask: AdmitAsk) -> bool:
        """Admit one request, or change nothing; return whether those behind it may be admitted.

        One that waits for blocks which are on their way here for another keeps nobody back.
        """
        request = RequestState(
            request_id=ask.request_id,
            num_tokens=ask.num_tokens,
            hashes=list(ask.hashes),
            num_preemptions=int(ask.resumed),
            content=known_content(ask.content),
        )
        manager = self.instance.manager
        hit = _Hit(*manager.get_computed_blocks(request, ask.target_tokens))
        peer = self._better_peer(ask, hit) if ask.allow_remote else None
        if peer is None:
            return self._admit_compute(ask, request, hit)
        holder, held_tokens = peer
        if self.loading.is_bringing(ask.hashes, hit.num_tokens, held_tokens):
            return True
        return self._admit_load(ask, request, hit, holder, held_tokens)

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
        num_new = min(wanted, self.outcome.token_budget)
        if wanted and not num_new:
            return False
        granted = self.outcome.grant(
            self.instance,
            request,
            num_new,
            reaches_target=num_new == wanted,
            hit_tokens=hit.num_tokens,
            hit_blocks=hit.blocks,
        )
        if granted is None:
            return False
        self._enter(ask, request, hit)
        self.outcome.scheduled.append(
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

    def _admit_load(
        self, ask: AdmitAsk, request: RequestState, hit: _Hit, holder: Instance, held_tokens: int
    ) -> bool:
        granted = self.instance.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit.num_tokens,
            new_computed_blocks=hit.blocks,
            num_external_computed_tokens=held_tokens - hit.num_tokens,
            delay_cache_blocks=True,
        )
        if granted is None:
            return False
        self._enter(ask, request, hit)
        self.loading.begin(request, holder, held_tokens, ttl_s=self.load_ttl_s)
        self.state.move_decode_handoff(self.instance, ask.request_id, HandoffEvent.PULL_STARTED)
        return True

    def _enter(self, ask: AdmitAsk, request: RequestState, hit: _Hit) -> None:
        request.num_computed_tokens = hit.num_tokens
        self.instance.requests[ask.request_id] = request
        self.instance.accounts.admitted(
            ask.request_id,
            asked_tokens=ask.target_tokens,
            hit_tokens=hit.num_tokens,
            resumed=ask.resumed,
        )
