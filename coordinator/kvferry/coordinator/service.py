"""The coordinator's only door: a command and the time go in, a reply and effects come out.

Single-threaded, without clock, I/O or randomness; the shells and the simulator run the same code.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvferry.coordinator import invariants
from kvferry.coordinator.block_sampling import BlockSampler, require_sample_every
from kvferry.coordinator.draining import (
    drain,
    end_drains,
    require_not_drained,
    require_not_draining,
)
from kvferry.coordinator.event_snapshot import snapshot_events
from kvferry.coordinator.finding import lease_command, locate
from kvferry.coordinator.handing_over import close_handoff, open_handoff
from kvferry.coordinator.held import held_of
from kvferry.coordinator.instances import Instance
from kvferry.coordinator.leases import require_ttl
from kvferry.coordinator.moving import moves_of_store
from kvferry.coordinator.pool_events import Cleared, PoolEvent
from kvferry.coordinator.registration import check_registration, require_same_member
from kvferry.coordinator.resetting import reset_identity
from kvferry.coordinator.restoring import restore_blocks, restore_requests
from kvferry.coordinator.silence import DEAD_AFTER_S, SUSPECT_AFTER_S, Silence
from kvferry.coordinator.state import InstanceEvents, ServiceState
from kvferry.coordinator.step import apply_step
from kvferry.coordinator.storing import end_reservation, expire_reservations, reserve
from kvferry.coordinator.warming import begin_warming, require_share
from kvferry.proto.drain_messages import Drain
from kvferry.proto.errors import (
    BadInputError,
    NotRegisteredError,
    RestoringError,
    StaleError,
)
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Epoch, Incarnation, InstanceId
from kvferry.proto.messages import (
    AcquireLease,
    CloseHandoff,
    Command,
    Describe,
    Description,
    Done,
    Effect,
    EndReservation,
    Heard,
    Heartbeat,
    InstanceStatus,
    Locate,
    MemberCommand,
    OpenHandoff,
    Registered,
    RegisterInstance,
    ReleaseLease,
    RemoveInstance,
    RenewLease,
    Reply,
    Reserve,
    ResetIdentity,
    Tick,
)
from kvferry.proto.restore_messages import RestoreBlocks, RestoreRequests
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import Step

# A repeat comes within a call's deadline; at some thousand calls per second this covers seconds.
_REMEMBERED_REPLIES = 8192

# Of what gone instances held; some 20 ms.
_PURGED_AT_A_TICK = 50_000

NO_RESETS: Mapping[bytes, int] = {}


class CoordinatorService:
    """Who owns which block, for all instances of one service.

    Args:
        scheme: how every member hashes.
        epoch: this coordinator's life.
        resets: how often each identity was ever reset, by its digest (see `resets`).
        expected_identity: the only identity that may join; None admits any.
        lease_cap_s: longest life of a lease, renewals included.
        step_lease_s: how long the source of a load is leased.
        suspect_after_s, dead_after_s: how long a member may be silent before nothing new is asked
            of it, and before it is forgotten.
        warm_share: the part of its blocks, 0 to 1, that an instance which is new fills with what is
            hot at its peers.
        sample_block_every: follow every n-th block that a pool hands out; None: none.
        tells_pool_events: keep what the pools do until `take_pool_events` is called, as must be
            done after every command; engines are asked to tell their requests' content.
        check_invariants: check everything after every command (slow; for tests).

    """

    def __init__(
        self,
        *,
        scheme: HashScheme,
        epoch: Epoch,
        resets: Mapping[bytes, int] = NO_RESETS,
        expected_identity: Identity | None = None,
        lease_cap_s: float = 300.0,
        step_lease_s: float = 60.0,
        suspect_after_s: float = SUSPECT_AFTER_S,
        dead_after_s: float = DEAD_AFTER_S,
        warm_share: float = 0.0,
        sample_block_every: int | None = None,
        tells_pool_events: bool = False,
        check_invariants: bool = False,
    ) -> None:
        """Start empty.

        Raises:
            BadInputError: a duration that is not a positive number of seconds, or `dead_after_s` no
                more than `suspect_after_s`.
            ConfigError: `sample_block_every` is not a positive integer, or `warm_share` no part.

        """
        if sample_block_every is not None:
            require_sample_every(sample_block_every)
        require_ttl("step_lease_s", step_lease_s)
        self.scheme = scheme
        self.epoch = epoch
        self.state = ServiceState(
            epoch,
            lease_cap_s,
            silence=Silence(suspect_after_s, dead_after_s),
            resets=resets,
            tells_pool_events=tells_pool_events,
        )
        self._wants_content = tells_pool_events
        self._expected_identity = expected_identity
        self._step_lease_s = step_lease_s
        self._warm_share = require_share(warm_share)
        self._sample_block_every = sample_block_every
        self._check_invariants = check_invariants
        self._replies: OrderedDict[tuple[type, str], tuple[Reply, int]] = OrderedDict()

    def handle(self, command: Command, now: float) -> tuple[Reply, tuple[Effect, ...]]:
        """Execute one command at `now` (seconds on any clock that never goes back).

        A command whose `call_id` was answered before gets the same reply and has no second effect.

        Raises:
            KvferryError: the command is refused; it has changed nothing then, except that what was
                past its deadline has ended and that its sender was heard.

        """
        self.state.moment.now_s = now
        expired = (
            self.state.end_silent(now)
            | self.state.expire(now)
            | expire_reservations(self.state, now)
        )
        reply = self._remembered(command)
        if isinstance(command, Tick):
            self.state.index.purge(_PURGED_AT_A_TICK)
            reply = Done(changed=end_drains(self.state, now) or expired)
        elif reply is None:
            reply = self._run(command, now)
            self._remember(command, reply)
        self.state.follow_pools()
        if self._check_invariants:
            invariants.check(self)
        return reply, self.state.take_effects()

    def resets(self) -> dict[bytes, int]:
        """Return how often each identity was ever reset, by its digest.

        It must outlive this coordinator: it is to be saved before the reply to a reset is given.
        """
        return dict(self.state.resets)

    def take_pool_events(self) -> list[InstanceEvents]:
        """Return what the pools of all instances did since the last call, in order.

        Every life of an instance begins and ends with `Cleared`.
        """
        return self.state.take_pool_events()

    def pool_snapshot(self, instance_id: InstanceId) -> list[PoolEvent]:
        """Return `Cleared` and what makes everything findable at an instance, if it is there."""
        instance = self.state.instances.get(instance_id)
        return [Cleared()] if instance is None else snapshot_events(instance.manager)

    def _remembered(self, command: Command) -> Reply | None:
        """Return the reply to an earlier call of this kind and id.

        Raises:
            BadInputError: that call asked for something else.

        """
        call_id = _call_id(command)
        if call_id is None or call_id not in self._replies:
            return None
        reply, fingerprint = self._replies[call_id]
        if fingerprint != hash(command):
            raise BadInputError(
                "another command of this kind had the same call_id",
                given=call_id[1],
                allowed="a new id for a new command, the same id for a repeat",
            )
        return reply

    def _remember(self, command: Command, reply: Reply) -> None:
        call_id = _call_id(command)
        if call_id is None:
            return
        self._replies[call_id] = (reply, hash(command))
        if len(self._replies) > _REMEMBERED_REPLIES:
            self._replies.popitem(last=False)

    def _run(self, command: Command, now: float) -> Reply:
        reply: Reply
        match command:
            case (
                Step()
                | Heartbeat()
                | Reserve()
                | EndReservation()
                | RestoreBlocks()
                | RestoreRequests()
            ):
                reply = self._member(command, now)
            case RegisterInstance() | RemoveInstance():
                reply = self._membership(command)
            case AcquireLease() | RenewLease() | ReleaseLease():
                reply = lease_command(self.state, command, now)
            case Drain():
                reply = drain(self.state, command, now)
            case OpenHandoff():
                reply = open_handoff(self.state, command, now)
            case CloseHandoff():
                reply = close_handoff(self.state, command)
            case ResetIdentity():
                reply = reset_identity(self.state, command)
            case Locate():
                reply = locate(self.state, command)
            case Describe():
                reply = self._describe()
            case _:
                raise BadInputError("not a command", given=type(command).__name__)
        return reply

    # --- membership --------------------------------------------------------------------------

    def _membership(self, command: RegisterInstance | RemoveInstance) -> Reply:
        if isinstance(command, RegisterInstance):
            return self._register(command)
        known = self.state.instances.get(command.instance_id)
        if known is None:
            return Done(changed=False)
        self._require_incarnation(known, command.incarnation)
        self.state.remove_instance(command.instance_id)
        self.state.note("instance_removed", f"{command.instance_id}: {command.reason}")
        return Done(changed=True)

    def _register(self, command: RegisterInstance) -> Registered:
        info = command.info
        check_registration(
            info,
            scheme=self.scheme,
            expected_identity=self._expected_identity,
            members=(instance.info for instance in self.state.instances.values()),
        )
        require_not_drained(self.state, info)
        # Built first: a pool that cannot be made is refused before its last life is forgotten.
        instance = Instance(info, self._new_sampler())
        known = self.state.instances.get(info.instance_id)
        if known is not None:
            if info.incarnation < known.info.incarnation:
                self._require_incarnation(known, info.incarnation)
            if info.incarnation == known.info.incarnation:
                require_same_member(known.info, info)
                if not command.returning:
                    self.state.hear(known)
                    return self._registered(known)
            self.state.remove_instance(info.instance_id)
            self.state.note(
                "instance_replaced",
                f"{info.instance_id}: incarnation {known.info.incarnation} by {info.incarnation}",
            )
        instance.returning_as = command.call_id if command.returning else None
        self.state.add_instance(instance)
        if self._warm_share and not command.returning:
            begin_warming(self.state, instance, self._warm_share, self.state.moment.now_s)
        places = ", ".join(info.rank_addresses)
        self.state.note("instance_registered", f"{info.instance_id} at {places}")
        return self._registered(instance)

    def _registered(self, instance: Instance) -> Registered:
        return Registered(
            epoch=self.epoch,
            wants_content=self._wants_content,
            num_resets=instance.num_resets,
        )

    def _new_sampler(self) -> BlockSampler | None:
        if self._sample_block_every is None:
            return None
        return BlockSampler(self._sample_block_every, self.state.moment)

    def _require_incarnation(self, known: Instance, incarnation: Incarnation) -> None:
        if incarnation != known.info.incarnation:
            raise StaleError(
                f"another incarnation of {known.info.instance_id} is registered",
                given=incarnation,
                allowed=known.info.incarnation,
            )

    def _sender(self, command: MemberCommand) -> Instance:
        if command.epoch != self.epoch:
            raise NotRegisteredError(
                "made under another life of the coordinator",
                given=command.epoch,
                allowed=self.epoch,
            )
        instance = self.state.instances.get(command.instance_id)
        if instance is None:
            raise NotRegisteredError(
                "unknown instance", given=command.instance_id, allowed=sorted(self.state.instances)
            )
        self._require_incarnation(instance, command.incarnation)
        self.state.hear(instance)
        if isinstance(command, Heartbeat):
            return instance
        if isinstance(command, RestoreBlocks | RestoreRequests):
            if command.registration != instance.returning_as:
                raise NotRegisteredError(
                    "not a registration by which the instance comes back",
                    given=command.registration,
                    allowed=instance.returning_as,
                )
        elif instance.returning_as is not None:
            raise RestoringError(
                "the instance has not told all that it holds", given=command.instance_id
            )
        return instance

    # --- what members say --------------------------------------------------------------------

    def _member(self, command: MemberCommand, now: float) -> Reply:
        instance = self._sender(command)
        match command:
            case Heartbeat():
                return Heard(moves=moves_of_store(self.state, instance, now))
            case RestoreBlocks():
                return restore_blocks(instance, command)
            case RestoreRequests():
                return restore_requests(self.state, instance, command)
            case Reserve():
                require_not_draining(instance)
                return reserve(self.state, instance, command, now=now)
            case EndReservation():
                return end_reservation(self.state, instance, command)
            case Step():
                return apply_step(
                    self.state, instance, command, now=now, step_lease_s=self._step_lease_s
                )

    # --- looking in --------------------------------------------------------------------------

    def _describe(self) -> Description:
        return Description(
            epoch=self.epoch,
            scheme=self.scheme,
            instances=tuple(self._status(instance) for instance in self.state.instances.values()),
            num_leases=len(self.state.leases),
            num_handoffs=len(self.state.handoffs),
            counters=dict(self.state.counters),
        )

    def _status(self, instance: Instance) -> InstanceStatus:
        pool = instance.manager.pool
        return InstanceStatus(
            info=instance.info,
            num_used_blocks=pool.num_used_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_requests=instance.num_requests,
            stats=instance.stats(),
            held=held_of(instance, self.state.leases),
            state=instance.state,
        )


def _call_id(command: Command) -> tuple[type, str] | None:
    """Return what makes a call unique; commands that change nothing have no id."""
    call_id: str | None = getattr(command, "call_id", None)
    return None if call_id is None else (type(command), call_id)
