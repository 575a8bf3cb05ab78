"""Blocks that come from peers: how a load begins, ends, and goes on at another holder."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.coordinator.handoff import HandoffEvent
from kvferry.coordinator.instances import Instance, LoadInFlight
from kvferry.coordinator.request_state import RequestState
from kvferry.coordinator.state import ServiceState
from kvferry.coordinator.step_outcome import StepOutcome
from kvferry.proto.errors import NotFoundError, StaleError
from kvferry.proto.ids import BlockHash, InstanceId, RequestId
from kvferry.proto.shared_chain import block_keys, blocks_of_range
from kvferry.proto.step_messages import Load, LoadFailure, LoadResult

# What a holder answers that lacks the block it was asked for.
_GONE = frozenset({NotFoundError.__name__, StaleError.__name__})


@dataclass(slots=True)
class Loading:
    """The loads of one instance in one step; decisions go to `outcome`, `now` is in seconds."""

    state: ServiceState
    instance: Instance
    outcome: StepOutcome
    now: float

    def begin(
        self,
        request: RequestState,
        holder: Instance,
        asked_tokens: int,
        *,
        ttl_s: float,
        tried: tuple[InstanceId, ...] = (),
        ahead: bool = False,
    ) -> None:
        """Let the holder bring what a request lacks of its first `asked_tokens` tokens.

        Args:
            request: has the blocks; what is computed of it is not asked for.
            holder: can serve them.
            asked_tokens: whole blocks of the instance.
            ttl_s: seconds that this load and those after it may take.
            tried: the holders that failed before.
            ahead: the request follows a prefill and is not admitted.

        """
        instance, hash_tokens = self.instance, self.instance.hash_block_tokens
        num_hashes = asked_tokens // hash_tokens
        lease = self.state.lease_blocks(
            holder,
            self.state.blocks_of_prefix(
                holder,
                request.hashes,
                instance.rules,
                start=request.num_computed_tokens // hash_tokens,
                end=num_hashes,
            ),
            num_prefix_hashes=num_hashes,
            now=self.now,
            ttl_s=ttl_s,
            beneficiary=instance.info.instance_id,
        )
        instance.loads[request.request_id] = LoadInFlight(
            lease_id=lease.lease_id,
            hit_tokens=request.num_computed_tokens,
            asked_tokens=asked_tokens,
            deadline_s=lease.deadline_s,
            tried=(*tried, holder.info.instance_id),
            ahead=ahead,
        )
        num_blocks = asked_tokens // instance.block_tokens
        self.outcome.loads.append(
            Load(
                request_id=request.request_id,
                block_ids=tuple(
                    table[:num_blocks] for table in instance.tables(request.request_id)
                ),
                num_hit_blocks=request.num_computed_tokens // instance.block_tokens,
                source=holder.source,
                lease_id=lease.lease_id,
                ttl_s=lease.deadline_s - self.now,
                ahead=ahead,
            )
        )

    def is_bringing(self, hashes: Sequence[BlockHash], start: int, end: int) -> bool:
        """Tell whether a load in flight will spare another one the tokens `[start, end)`, or some.

        Args:
            hashes: of the request that lacks these tokens.
            start: where what it has ends.
            end: where what a peer has for it ends.

        """
        instance, hash_tokens = self.instance, self.instance.hash_block_tokens
        for request_id, load in instance.loads.items():
            # A hash stands for all tokens before it: comparing one will do.
            if instance.takes_partial_loads:
                position = max(start, load.hit_tokens) + instance.block_tokens
            else:
                position = load.asked_tokens
            if start < position <= min(end, load.asked_tokens):
                last = position // hash_tokens - 1
                if instance.requests[request_id].hashes[last] == hashes[last]:
                    return True
        return False

    def end(self, results: Sequence[LoadResult]) -> dict[RequestId, LoadInFlight]:
        """Take in how loads ended; return those that failed, for `go_on`."""
        failed: dict[RequestId, LoadInFlight] = {}
        for result in results:
            load = self.instance.loads.pop(result.request_id, None)
            if load is None:
                self.state.counters["ignored_messages"] += 1
                continue
            if result.failure is not None:
                self.state.counters["failed_loads"] += 1
                self._forget_gone(load, result.request_id, result.failure)
            self.state.end_lease(load.lease_id)
            if result.num_computed_tokens == load.asked_tokens or self.instance.takes_partial_loads:
                self._commit(result)
            if load.ahead:
                self._end_ahead(result)
                continue
            if load.cancelled:
                self._give_up(load, result.request_id)
                continue
            self.instance.accounts.loaded(
                result.request_id, self.instance.requests[result.request_id].num_computed_tokens
            )
            if result.num_computed_tokens < load.asked_tokens:
                failed[result.request_id] = load
            else:
                self._move_handoff(result.request_id, HandoffEvent.FINISHED)
        return failed

    def go_on(self, failed: dict[RequestId, LoadInFlight]) -> None:
        """Let other holders bring what failed loads did not; what nobody brings is computed."""
        for request_id, load in failed.items():
            request = self.instance.requests.get(request_id)
            if request is None:  # released in this step
                self._move_handoff(request_id, HandoffEvent.FAILED)
            elif not self._load_elsewhere(request, load):
                self._end_short(request_id)

    def _load_elsewhere(self, request: RequestState, load: LoadInFlight) -> bool:
        if load.deadline_s <= self.now:
            return False
        instance = self.instance
        max_hashes = load.asked_tokens // instance.hash_block_tokens
        peer = self.state.best_peer(instance, request.hashes, max_hashes, without=load.tried)
        if peer is None:
            return False
        end_tokens = peer[1] * instance.hash_block_tokens
        # Where a part is of no use, the tables hold just what is needed before the end asked for.
        partly = instance.takes_partial_loads
        if end_tokens < (request.num_computed_tokens + 1 if partly else load.asked_tokens):
            return False
        self.begin(request, peer[0], end_tokens, ttl_s=load.deadline_s - self.now, tried=load.tried)
        self.state.counters["repeated_loads"] += 1
        return True

    def _end_short(self, request_id: RequestId) -> None:
        if self.instance.takes_partial_loads:
            self._move_handoff(request_id, HandoffEvent.FINISHED)
            return
        # Some group lacks the blocks before the end of what arrived, and those before its hit.
        self.instance.forget_request(request_id)
        self.outcome.preempted.append(request_id)
        self.outcome.failed_loads.add(request_id)
        self._move_handoff(request_id, HandoffEvent.FAILED)

    def _end_ahead(self, result: LoadResult) -> None:
        """Give the blocks back; a failure ends loading ahead."""
        self.instance.forget_request(result.request_id)
        follower = self.instance.followers.get(result.request_id)
        if follower is not None and result.failure is not None:
            follower.may_load = False

    def _give_up(self, load: LoadInFlight, request_id: RequestId) -> None:
        self.instance.forget_request(request_id)
        if load.released:
            self._move_handoff(request_id, HandoffEvent.FAILED)
        else:
            self.outcome.preempted.append(request_id)
            self._move_handoff(request_id, HandoffEvent.PULL_CANCELLED)

    def _commit(self, result: LoadResult) -> None:
        request = self.instance.requests[result.request_id]
        request.num_computed_tokens = result.num_computed_tokens
        self.instance.manager.cache_blocks(request, result.num_computed_tokens)

    def _forget_gone(self, load: LoadInFlight, request_id: RequestId, failure: LoadFailure) -> None:
        """Promise nobody what its holder said it does not have, nor what the load has after that.

        A holder that sends parts of blocks, several at once, knows only where the lack begins. As
        long as the lease lives: otherwise the holder's pool knows what has become of its blocks.
        """
        lease = self.state.leases.get(load.lease_id)
        if lease is None or failure.error_type not in _GONE:
            return
        instance, holder = self.instance, self.state.instance(lease.instance_id)
        start = failure.block * instance.hashes_per_block
        end = load.asked_tokens // instance.hash_block_tokens
        covered = holder.hashes_per_block
        blocks = blocks_of_range(start, end, covered)
        hashes = instance.requests[request_id].hashes
        keys = block_keys(hashes[blocks.start * covered : blocks.stop * covered], covered)
        self.state.forget_blocks(holder, keys, failure.group_id)

    def _move_handoff(self, request_id: RequestId, event: HandoffEvent) -> None:
        self.state.move_decode_handoff(self.instance, request_id, event)
