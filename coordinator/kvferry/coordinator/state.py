"""Everything the coordinator remembers, and the few changes that span several parts of it.

Used by the service, the step and the checks; decides no policy.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from kvferry.coordinator.block_sampling import Moment
from kvferry.coordinator.counters import COUNTERS
from kvferry.coordinator.handoff import Handoff, HandoffEvent
from kvferry.coordinator.instances import Instance, Reservation
from kvferry.coordinator.leases import Lease, LeaseTable
from kvferry.coordinator.location_index import LocationIndex
from kvferry.coordinator.pool_events import Cleared, PoolEvent
from kvferry.coordinator.prefix_rules import PrefixRule
from kvferry.coordinator.silence import Silence
from kvferry.proto.drain_messages import Drained
from kvferry.proto.errors import InvariantError, NotFoundError
from kvferry.proto.ids import (
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    InstanceId,
    LeaseId,
    RequestId,
)
from kvferry.proto.messages import Effect
from kvferry.proto.shared_chain import block_keys, blocks_of_range

InstanceEvents = tuple[InstanceId, Sequence[PoolEvent]]
"""What one instance's pool did, in order."""


class ServiceState:
    """Instances, location index, leases, handoffs and counters of one coordinator life."""

    def __init__(
        self,
        epoch: Epoch,
        lease_cap_s: float,
        *,
        silence: Silence,
        resets: Mapping[bytes, int],
        tells_pool_events: bool,
    ) -> None:
        """Start without members.

        Args:
            epoch: this life of the coordinator.
            lease_cap_s: the longest time to live that a lease gets, in seconds.
            silence: which counts that of the members.
            resets: how often each identity was ever reset, by its digest.
            tells_pool_events: somebody takes them after each command.

        Raises:
            BadInputError: as `LeaseTable`.

        """
        self.epoch = epoch
        self.moment = Moment()
        self.silence = silence
        self.instances: dict[InstanceId, Instance] = {}
        self.index = LocationIndex()
        self.leases = LeaseTable(epoch, lease_cap_s)
        self.resets = Counter(resets)
        self.handoffs: dict[RequestId, Handoff] = {}
        self.draining: dict[InstanceId, Instance] = {}
        # How the last drain of each instance ended, the oldest first; that life does not come back.
        self.drained: dict[InstanceId, Drained] = {}
        # No reservation can have expired before this moment.
        self.earliest_reservation_s = math.inf
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._effects: list[Effect] = []
        self._tells_pool_events = tells_pool_events
        self._pool_events: list[InstanceEvents] = []

    def instance(self, instance_id: InstanceId) -> Instance:
        """Return a registered instance.

        Raises:
            NotFoundError: naming the known ones.

        """
        found = self.instances.get(instance_id)
        if found is None:
            raise NotFoundError(
                "unknown instance", given=instance_id, allowed=sorted(self.instances)
            )
        return found

    # --- membership --------------------------------------------------------------------------

    def add_instance(self, instance: Instance) -> None:
        """Take a new instance in."""
        self._tell(instance.info.instance_id, [Cleared()])
        if instance.info.role == "store":
            instance.num_resets = self.resets[instance.identity_digest]
        self.silence.hear(instance)
        self.instances[instance.info.instance_id] = instance
        self.index.join(
            instance.info.instance_id, instance.identity_digest, instance.hashes_per_block
        )

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Forget an instance: its blocks, the leases on it and for it, and its handoffs."""
        for handoff in list(self.handoffs.values()):
            if instance_id in (handoff.prefill_instance, handoff.decode_instance):
                self.move_handoff(handoff, HandoffEvent.FAILED)
        for lease in self.leases.live():
            if instance_id in (lease.instance_id, lease.beneficiary):
                self.end_lease(lease.lease_id)
        del self.instances[instance_id]
        for going in self.draining.values():
            if going.draining is not None:
                going.draining.forget(instance_id)
        for peer in self.instances.values():
            # Its next life has other blocks, and does not go.
            for key in [key for key in peer.wanted if key[0] == instance_id]:
                del peer.wanted[key]
        self.draining.pop(instance_id, None)
        self.index.leave(instance_id)
        self._tell(instance_id, [Cleared()])

    def hear(self, instance: Instance) -> None:
        """Take note that a member lives."""
        if self.silence.hear(instance):
            self.note("instance_heard", f"{instance.info.instance_id} is no suspect any more")

    def end_silent(self, now: float) -> bool:
        """Forget who was not heard for too long, and tell whether there was anybody.

        Args:
            now: seconds on the clock of all commands.

        """
        suspects, dead = self.silence.pass_time(now, self.instances)
        for instance in suspects:
            self.counters["suspects"] += 1
            self.note("instance_suspected", f"{instance.info.instance_id} was not heard lately")
        for instance in dead:
            self.counters["deaths"] += 1
            silent_s = self.silence.of(instance)
            self.remove_instance(instance.info.instance_id)
            self.note("instance_died", f"{instance.info.instance_id}: silent for {silent_s:.1f} s")
        return bool(dead)

    def follow_pools(self) -> None:
        """Bring the location index, and whoever takes the events, up to date with every pool."""
        for instance_id, instance in self.instances.items():
            events = instance.manager.pool.take_events()
            if events:
                self.index.apply(instance_id, events)
                if instance.draining is not None:
                    instance.draining.follow(events)
                self._tell(instance_id, events)

    def _tell(self, instance_id: InstanceId, events: Sequence[PoolEvent]) -> None:
        if self._tells_pool_events:
            self._pool_events.append((instance_id, events))

    def take_pool_events(self) -> list[InstanceEvents]:
        """Return what pools did since the last call, in order.

        Every life of an instance begins and ends with `Cleared`.
        """
        told, self._pool_events = self._pool_events, []
        return told

    # --- finding -----------------------------------------------------------------------------

    def holders(
        self, identity_digest: bytes, hashes: tuple[BlockHash, ...]
    ) -> list[tuple[Instance, int]]:
        """Return the instances of an identity with the hashes of the prefix that each can serve.

        They are for whoever takes single hashes of the chain, as clients do. Longest prefix first,
        then fewest requests, then id; no suspects.
        """
        members = [
            instance
            for instance in self.instances.values()
            if instance.identity_digest == identity_digest and not instance.is_suspect
        ]
        if not members:
            return []
        rules = members[0].rules_of_hashes
        lengths = self.index.longest_usable(identity_digest, hashes, rules)
        found = [(instance, lengths.get(instance.info.instance_id, 0)) for instance in members]
        found.sort(key=lambda h: (-h[1], h[0].num_requests, h[0].info.instance_id))
        return found

    def best_peer(
        self,
        instance: Instance,
        hashes: Sequence[BlockHash],
        max_hashes: int,
        *,
        without: Collection[InstanceId] = (),
    ) -> tuple[Instance, int] | None:
        """Return the other instance that can serve most of the prefix, and how many hashes.

        They are whole blocks of `instance`, and at most the first `max_hashes` of `hashes`. Of
        several with as many, the one with the fewest requests, then the first by id; no suspects,
        and none of `without`.
        """
        lengths = self.index.longest_usable(
            instance.identity_digest, hashes, instance.rules, max_hashes
        )
        best: tuple[Instance, int] | None = None
        for instance_id, length in lengths.longest_first():
            peer = self.instances[instance_id]
            if best is not None and length < best[1]:
                break
            if instance_id in without or peer.is_suspect:
                continue
            if peer is not instance and (best is None or _load_of(peer) < _load_of(best[0])):
                best = (peer, length)
        return best

    def blocks_of_prefix(
        self,
        holder: Instance,
        hashes: Sequence[BlockHash],
        rules: Sequence[PrefixRule],
        *,
        start: int = 0,
        end: int,
    ) -> tuple[BlockId, ...]:
        """Return the holder's blocks that serve the hashes `[start, end)` of a chain, per group.

        Those that a group's rule does not need are left out. The `rules` are those of whoever
        goes on after the prefix. `hashes` reaches as far as the holder's last block, whose hash may
        come after `end`.

        Raises:
            InvariantError: the pool has fewer than the location index says.

        """
        found: list[BlockId] = []
        covered = holder.hashes_per_block
        for group_id, rule in enumerate(rules):
            first = max(start, rule.first_needed(end))
            needed = blocks_of_range(first, end, covered)
            keys = block_keys(hashes[needed.start * covered : needed.stop * covered], covered)
            blocks = holder.manager.pool.get_cached_prefix(keys, GroupId(group_id))
            if len(blocks) != len(needed):
                raise InvariantError(
                    f"the location index and the pool of {holder.info.instance_id} disagree",
                    given={"group": group_id, "index": len(needed), "pool": len(blocks)},
                )
            found += blocks
        return tuple(found)

    def forget_blocks(
        self, holder: Instance, hashes: Iterable[BlockHash], group_id: GroupId
    ) -> None:
        """Let nobody find these blocks at an instance any more: its workers do not have them."""
        pool = holder.manager.pool
        for block_hash in hashes:
            while (block := pool.get_cached_block(block_hash, group_id)) is not None:
                pool.evict_blocks([block])
        # Whoever is admitted later in this step must not be promised them either.
        self.follow_pools()

    # --- leases ------------------------------------------------------------------------------

    def lease_blocks(
        self,
        instance: Instance,
        block_ids: tuple[BlockId, ...],
        *,
        num_prefix_hashes: int,
        now: float,
        ttl_s: float,
        beneficiary: InstanceId | None = None,
    ) -> Lease:
        """Keep the blocks that serve a prefix in place for `ttl_s` seconds (at most the cap).

        Raises:
            BadInputError: `ttl_s` is not a positive number.

        """
        lease = self.leases.add(
            instance.info.instance_id,
            block_ids,
            num_prefix_hashes=num_prefix_hashes,
            now=now,
            ttl_s=ttl_s,
            beneficiary=beneficiary,
        )
        instance.manager.pool.touch(block_ids)
        return lease

    def add_reservation(self, instance: Instance, reservation: Reservation) -> LeaseId:
        """Keep a reservation until its deadline at the latest, and return its id."""
        reservation_id = self.leases.new_id()
        instance.reservations[reservation_id] = reservation
        self.earliest_reservation_s = min(self.earliest_reservation_s, reservation.deadline_s)
        return reservation_id

    def end_lease(self, lease_id: LeaseId) -> bool:
        """Give a lease's blocks back, and tell whether there was one."""
        lease = self.leases.remove(lease_id)
        if lease is None:
            return False
        self._free_leased(lease)
        return True

    def _free_leased(self, lease: Lease) -> None:
        pool = self.instance(lease.instance_id).manager.pool
        pool.free_blocks(reversed(lease.block_ids))

    # --- handoffs ----------------------------------------------------------------------------

    def move_handoff(self, handoff: Handoff, event: HandoffEvent) -> None:
        """Apply an event; a handoff that has come to its end is forgotten with its lease.

        Raises:
            InvariantError: the event is not allowed in this state, or the handoff has ended.

        """
        handoff.apply(event)
        if handoff.is_live:
            return
        if self.handoffs.pop(handoff.request_id, None) is not handoff:
            raise InvariantError("a handoff ended twice", given=handoff.request_id)
        if handoff.lease_id is not None:
            self.end_lease(handoff.lease_id)
        self.counters[f"handoffs_{handoff.state.value}"] += 1

    def move_decode_handoff(
        self, instance: Instance, request_id: RequestId, event: HandoffEvent
    ) -> None:
        """Apply an event seen at the decode side, if there is a handoff to it that allows it."""
        handoff = self.handoffs.get(request_id)
        if (
            handoff is not None
            and handoff.decode_instance == instance.info.instance_id
            and handoff.can(event)
        ):
            self.move_handoff(handoff, event)

    def expire(self, now: float) -> bool:
        """End what is past its deadline, and tell whether there was anything.

        Args:
            now: seconds on the clock that the deadlines were set by.

        """
        # Handoffs first: they take their lease along, which then does not count as expired.
        late = [handoff for handoff in self.handoffs.values() if handoff.deadline_s <= now]
        for handoff in late:
            self.move_handoff(handoff, HandoffEvent.DEADLINE)
            self.note("handoff_expired", f"handoff of request {handoff.request_id}")
        leases = self.leases.expire(now)
        for lease in leases:
            self._free_leased(lease)
            self.counters["expired_leases"] += 1
            self.note("lease_expired", f"{lease.lease_id} on {lease.instance_id}")
        return bool(late or leases)

    # --- telling -----------------------------------------------------------------------------

    def note(self, kind: str, detail: str) -> None:
        """Leave an effect for the shell."""
        self._effects.append(Effect(kind=kind, detail=detail))

    def take_effects(self) -> tuple[Effect, ...]:
        """Return the effects since the last call."""
        effects, self._effects = self._effects, []
        return tuple(effects)


def _load_of(instance: Instance) -> tuple[int, InstanceId]:
    return instance.num_requests, instance.info.instance_id
