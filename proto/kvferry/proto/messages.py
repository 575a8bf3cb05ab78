"""What processes say to the coordinator, and what it answers: frozen values, no behaviour.

Commands go in through `CoordinatorService.handle(command, now)`; replies come out. Engines
send theirs packed (`packed_messages.py`), and clients as protobuf (`control_codec.py`), over the
gRPC front; the router's travel in Ray's calls as they are.

Every mutating command carries `call_id`: a repeat of the same command gets the same reply again.
What an instance says also carries the lives it was said under (`epoch` of the coordinator,
`incarnation` of the instance); from an earlier life it is refused with `StaleError`.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import InvariantError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import (
    FIRST_GROUP,
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    Incarnation,
    InstanceId,
    LeaseId,
    RequestId,
)
from kvferry.proto.instance_stats import Held, InstanceStats
from kvferry.proto.layout import Layout
from kvferry.proto.restore_messages import RestoreBlocks, RestoreRequests
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import Move, Source, Step, StepReply

Role = Literal["prefill", "decode", "store"]
InstanceState = Literal["live", "returning", "suspect", "draining"]
"""`returning`: it has not told all that it holds. `suspect`: it was not heard for a while.
`draining`: it does nothing new, and goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInfo:
    """One instance as it introduces itself.

    `num_blocks` includes the null block. `rank_addresses` are `host:port` of the transfer servers
    of its ranks, rank 0 first, `rank_pids` their processes, `rank_nodes` Ray's ids of their nodes,
    empty outside Ray; `rank_metrics` are `host:port` of their metrics, empty where they serve none.
    A virtual block of `layout` is a multiple of a hash block of `scheme`. `max_model_len` is in
    tokens, 0 for a store.
    `max_in_flight_tokens`: most tokens of one request that are computed in one step; it bounds the
    blocks that a group with a window holds (0: not told).
    """

    instance_id: InstanceId
    role: Role
    incarnation: Incarnation
    identity: Identity
    scheme: HashScheme
    layout: Layout
    num_blocks: int
    rank_addresses: tuple[str, ...]
    max_model_len: int
    max_in_flight_tokens: int = 0
    rank_pids: tuple[int, ...]
    rank_nodes: tuple[str, ...] = ()
    rank_metrics: tuple[str, ...] = ()
    version: str

    @property
    def source(self) -> Source:
        """Where blocks of this instance can be fetched."""
        return Source(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            layout=self.layout,
            rank_addresses=self.rank_addresses,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterInstance:
    """Join the service. An identical repeat is accepted; another living process is refused.

    With `returning` the instance holds blocks already, and is going to tell of them
    (`restore_messages`). Until it has told everything its steps and reservations are refused with
    `RestoringError`; what it has told so far can be found. Whatever was known of it is forgotten.
    """

    call_id: str
    info: InstanceInfo
    returning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The service as the new member must know it.

    `wants_content`: KV events are on, so admissions and progress are to tell the tokens.
    `num_resets`: how often the identity of a store was ever reset. What it holds from before the
    last time it must drop, and not tell of.
    """

    epoch: Epoch
    wants_content: bool = False
    num_resets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveInstance:
    """Forget an instance (it died or leaves): its blocks, leases and requests are dropped."""

    call_id: str
    instance_id: InstanceId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The instance lives. Repeating is harmless, so it needs no `call_id`."""

    epoch: Epoch
    instance_id: InstanceId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The instance is known, and was heard at this moment.

    `moves`: what a store is to pull. Each is said again until its end was told; its reservation
    tells those that were begun before.
    """

    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command took effect (`changed`) or had already (`not changed`)."""

    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Locate:
    """Ask who holds the longest prefix of `hashes` under this identity."""

    identity_digest: bytes
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One live instance of the identity and how many of the hashes, from the first on, it holds.

    They are whole blocks of the instance, each found by the last hash that it covers.
    """

    source: Source
    role: Role
    num_hashes: int
    num_requests: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """All live instances of the identity, longest prefix first, then fewest requests, then id.

    `avoid`: those of the identity that should get no new requests. Suspects are no holders.
    """

    epoch: Epoch
    holders: tuple[Holder, ...]
    avoid: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireLease:
    """Keep the longest prefix of `hashes` at one instance in place for `ttl_s` seconds.

    With `instance_id` None the instance with the longest prefix is taken.
    """

    call_id: str
    identity_digest: bytes
    hashes: tuple[BlockHash, ...]
    ttl_s: float
    instance_id: InstanceId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """The lease, on whole blocks of the source: the first `num_hashes` of the asked chain.

    0 hashes and no lease when nobody holds a prefix.
    """

    lease_id: LeaseId | None
    source: Source | None
    num_hashes: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLease:
    """Move a lease's deadline to `ttl_s` from now, up to the cap counted from its start."""

    call_id: str
    lease_id: LeaseId
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """Give a lease back. Unknown or expired ids are no error (`Done.changed` is False)."""

    call_id: str
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """A worker asks for blocks of one group for content that a client is about to store.

    Hashes the instance already holds are left out: `Reserved.block_ids[i]` is None for them.
    All blocks are of one group. Instances whose blocks are no hash blocks of one rank refuse.
    """

    call_id: str
    epoch: Epoch
    instance_id: InstanceId
    incarnation: Incarnation
    hashes: tuple[BlockHash, ...]
    group_id: GroupId = FIRST_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Destination blocks, owned by the reservation until `EndReservation`.

    `num_resets`: how often the identity of a store was ever reset. What its workers wrote under a
    smaller number is to be forgotten.
    """

    reservation_id: LeaseId
    block_ids: tuple[BlockId | None, ...]
    num_resets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReservation:
    """The writer is closed. The first `num_written` hashes become findable, the rest is freed.

    If the identity was reset meanwhile, nothing becomes findable (`Done.changed` is False).
    """

    call_id: str
    epoch: Epoch
    instance_id: InstanceId
    incarnation: Incarnation
    reservation_id: LeaseId
    num_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHandoff:
    """The router sends a prompt to a prefill instance, to be decoded elsewhere."""

    call_id: str
    request_id: RequestId
    prefill_instance: InstanceId
    decode_instance: InstanceId
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseHandoff:
    """The decode side has its blocks, or nobody needs them any more; the lease ends."""

    call_id: str
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetIdentity:
    """Let nothing be found again that the identity's stores hold, or are being given now.

    Leases on it end; what is being stored or taken does not become findable. Of stores only:
    instances that compute keep what they have, and what they still bring from a store.
    """

    call_id: str
    identity_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """How many blocks could be found until now."""

    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Ask for the service's scheme, identities and instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsPlace:
    """Where the KV events of one instance can be read, live and again, and under which topic."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """One instance as the coordinator sees it now; counts in blocks, null block not counted.

    `kv_events` is None where there are none, or where they are sent to a reader that listens.
    """

    info: InstanceInfo
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_requests: int
    stats: InstanceStats
    held: Held
    state: InstanceState = "live"
    kv_events: KvEventsPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The service at one moment."""

    epoch: Epoch
    scheme: HashScheme
    instances: tuple[InstanceStatus, ...]
    num_leases: int
    num_handoffs: int
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes: leases and handoffs past their deadline end."""


MemberCommand = Step | Heartbeat | Reserve | EndReservation | RestoreBlocks | RestoreRequests
"""What only a registered instance says, in the lives that it names."""

InstanceCommand = RegisterInstance | RemoveInstance | MemberCommand
PackedCommand = InstanceCommand | Drain
"""What processes of the same version of kvferry say; clients of other versions say the rest."""

ClientCommand = Describe | Locate | AcquireLease | RenewLease | ReleaseLease | ResetIdentity
Command = InstanceCommand | ClientCommand | OpenHandoff | CloseHandoff | Drain | Tick
Reply = (
    Registered
    | Done
    | Heard
    | StepReply
    | Located
    | Leased
    | Reserved
    | Forgotten
    | Drained
    | Description
)
_R = TypeVar("_R")


def expect(reply: Reply, kind: type[_R]) -> _R:
    """Return the reply, which must be of the kind that its command gets.

    Raises:
        InvariantError: it is of another kind.
    """
    if not isinstance(reply, kind):
        raise InvariantError(
            "a reply of another kind", given=type(reply).__name__, allowed=kind.__name__
        )
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Something the shell should tell a person: a lease expired, an instance was removed ..."""

    kind: str
    detail: str
