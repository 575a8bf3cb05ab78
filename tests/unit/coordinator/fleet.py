"""A service with instances, driven in the words of the tests; checks everything after each call."""

from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from tests.builders import make_identity, make_info

from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import (
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    Incarnation,
    InstanceId,
    LeaseId,
    RequestId,
    unpack_group,
)
from kvferry.proto.instance_stats import InstanceStats
from kvferry.proto.messages import (
    AcquireLease,
    CloseHandoff,
    Command,
    Describe,
    Description,
    Done,
    Effect,
    EndReservation,
    Forgotten,
    Heard,
    Heartbeat,
    InstanceInfo,
    Leased,
    Locate,
    Located,
    OpenHandoff,
    Registered,
    RegisterInstance,
    RemoveInstance,
    Reply,
    Reserve,
    Reserved,
    ResetIdentity,
    Tick,
)
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import (
    AdmitAsk,
    Load,
    LoadFailure,
    LoadResult,
    Progress,
    Release,
    RunningAsk,
    Scheduled,
    Step,
    StepReply,
)

BLOCK_TOKENS = 4
SCHEME = HashScheme(
    algorithm="sha256_cbor",
    key_format="0.32",
    hash_block_tokens=BLOCK_TOKENS,
    none_hash=b"\x01" * 32,
)
IDENTITY = make_identity()
HYBRID = replace(
    IDENTITY,
    num_layers=4,
    groups=(
        GroupSpec(kind="full", layers=(0,)),
        GroupSpec(kind="sliding_window", layers=(1,), window_tokens=2 * BLOCK_TOKENS + 1),
        GroupSpec(kind="chunked_local", layers=(2,), chunk_tokens=2 * BLOCK_TOKENS),
        GroupSpec(kind="mamba", layers=(3,), state_bytes=8),
    ),
)
R = TypeVar("R", bound=Reply)


def chain(text: str) -> tuple[BlockHash, ...]:
    """One hash per letter: equal prefixes of texts have equal hashes, as a hash chain has."""
    return tuple(BlockHash(text[: i + 1].encode().rjust(32, b"\0")) for i in range(len(text)))


def info(
    name: str, num_blocks: int = 10, incarnation: int = 1, covers: int = 1, **changes: Any
) -> InstanceInfo:
    """An instance whose blocks cover so many hashes each."""
    return make_info(
        name,
        block_tokens=covers * BLOCK_TOKENS,
        num_blocks=num_blocks,
        incarnation=Incarnation(incarnation),
        **{"scheme": SCHEME} | changes,
    )


def admit(name: str, text: str, extra_tokens: int = 1, **changes: Any) -> AdmitAsk:
    """A request of one hash per letter of `text` and `extra_tokens` (< 4) more tokens."""
    num_tokens = len(text) * BLOCK_TOKENS + extra_tokens
    made = AdmitAsk(
        request_id=RequestId(name),
        num_tokens=num_tokens,
        target_tokens=num_tokens,
        hashes=chain(text),
    )
    return replace(made, **changes)


def loaded(name: str, num_tokens: int, failure: LoadFailure | None = None) -> LoadResult:
    return LoadResult(request_id=RequestId(name), num_computed_tokens=num_tokens, failure=failure)


def failed(block: int, error_type: str = "UnavailableError", group: int = 0) -> LoadFailure:
    """A load ended with an error about a block of its taker."""
    return LoadFailure(
        error_type=error_type, message="it broke", group_id=GroupId(group), block=block
    )


def wrote(
    name: str, num_computed: int, num_tokens: int, new: tuple[BlockHash, ...] = ()
) -> Progress:
    return Progress(
        request_id=RequestId(name),
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        new_hashes=new,
    )


def release(name: str, handoff: bool = False) -> Release:
    return Release(request_id=RequestId(name), handoff=handoff)


def runs(name: str, target_tokens: int) -> RunningAsk:
    return RunningAsk(request_id=RequestId(name), target_tokens=target_tokens)


def num_granted(scheduled: Scheduled) -> int:
    """Return how many tokens may be computed."""
    return scheduled.granted_tokens - scheduled.num_computed_tokens


def new_blocks(scheduled: Scheduled) -> tuple[BlockId, ...]:
    """Return the blocks that were added in the only group."""
    (blocks,) = scheduled.new_block_ids
    return blocks


def load_blocks(load: Load) -> tuple[BlockId, ...]:
    """Return the table of the only group."""
    (blocks,) = load.block_ids
    return blocks


class Fleet:
    """One service under test, with its time in seconds."""

    def __init__(
        self, *, identity: Identity = IDENTITY, check_invariants: bool = True, **settings: Any
    ) -> None:
        self.identity = identity
        self._settings = {"check_invariants": check_invariants, **settings}
        self.service = CoordinatorService(scheme=SCHEME, epoch=Epoch(1), **self._settings)
        self.now = 0.0
        self.effects: list[Effect] = []
        self._calls = count(1)

    def restart(self) -> CoordinatorService:
        """Let the coordinator lose everything but its epoch and resets; return what it was."""
        before = self.service
        self.service = CoordinatorService(
            scheme=SCHEME,
            epoch=Epoch(before.epoch + 1),
            resets=before.resets(),
            **self._settings,
        )
        return before

    def call_id(self) -> str:
        return f"call-{next(self._calls)}"

    def send(self, command: Command) -> Reply:
        reply, effects = self.service.handle(command, self.now)
        self.effects.extend(effects)
        return reply

    def ask(self, command: Command, kind: type[R]) -> R:
        reply = self.send(command)
        assert isinstance(reply, kind)
        return reply

    def register(self, name: str, num_blocks: int = 10, **changes: Any) -> None:
        self.enter(info(name, num_blocks, **{"identity": self.identity, **changes}))

    def enter(self, made: InstanceInfo, *, returning: bool = False) -> Registered:
        command = RegisterInstance(call_id=self.call_id(), info=made, returning=returning)
        return self.ask(command, Registered)

    def remove(self, name: str, incarnation: int = 1) -> bool:
        command = RemoveInstance(
            call_id=self.call_id(),
            instance_id=InstanceId(name),
            incarnation=Incarnation(incarnation),
            reason="killed",
        )
        return self.ask(command, Done).changed

    def beat(self, name: str, incarnation: int = 1) -> Heard:
        command = Heartbeat(
            epoch=self.service.epoch,
            instance_id=InstanceId(name),
            incarnation=Incarnation(incarnation),
        )
        return self.ask(command, Heard)

    def wait(self, seconds: float, *beating: str) -> None:
        """Let time pass in steps of half a second, as a coordinator that runs sees it."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.send(Tick())
            for name in beating:
                self.beat(name, self.service.state.instance(InstanceId(name)).info.incarnation)

    def states(self) -> dict[str, str]:
        return {one.info.instance_id: one.state for one in self.describe().instances}

    def make_step(self, name: str, token_budget: int = 1000, **parts: Any) -> Step:
        known = self.service.state.instances.get(InstanceId(name))
        return Step(
            call_id=self.call_id(),
            epoch=self.service.epoch,
            instance_id=InstanceId(name),
            incarnation=known.info.incarnation if known else Incarnation(1),
            token_budget=token_budget,
            **parts,
        )

    def step(self, name: str, token_budget: int = 1000, **parts: Any) -> StepReply:
        return self.ask(self.make_step(name, token_budget, **parts), StepReply)

    def admit(self, name: str, ask: AdmitAsk) -> Scheduled:
        """Admit one request that must be scheduled at once."""
        (scheduled,) = self.step(name, waiting=(ask,)).scheduled
        return scheduled

    def admit_load(self, name: str, ask: AdmitAsk) -> Load:
        """Admit one request whose blocks must come from a peer."""
        (load,) = self.step(name, waiting=(ask,)).loads
        return load

    def compute(self, name: str, ask: AdmitAsk) -> None:
        """Admit one request and write all of its tokens."""
        self.admit(name, ask)
        self.step(name, progress=(wrote(ask.request_id, ask.target_tokens, ask.num_tokens),))

    def cache(self, name: str, text: str, request: str = "seed") -> None:
        """Leave the whole blocks of a text cached at an instance, owned by nobody."""
        self.compute(name, admit(request, text, allow_remote=False))
        self.step(name, releases=(release(request),))

    def locate(self, text: str) -> dict[str, int]:
        located = self.located(text)
        return {holder.source.instance_id: holder.num_hashes for holder in located.holders}

    def located(self, text: str) -> Located:
        command = Locate(identity_digest=self.identity.digest(), hashes=chain(text))
        return self.ask(command, Located)

    def lease(self, text: str, ttl_s: float = 10.0, at: str | None = None) -> Leased:
        command = AcquireLease(
            call_id=self.call_id(),
            identity_digest=self.identity.digest(),
            hashes=chain(text),
            ttl_s=ttl_s,
            instance_id=InstanceId(at) if at else None,
        )
        return self.ask(command, Leased)

    def reserve(self, name: str, text: str, group: int = 0) -> Reserved:
        command = Reserve(
            call_id=self.call_id(),
            epoch=self.service.epoch,
            instance_id=InstanceId(name),
            incarnation=Incarnation(1),
            hashes=chain(text),
            group_id=GroupId(group),
        )
        return self.ask(command, Reserved)

    def end_reservation(self, name: str, reservation_id: LeaseId, num_written: int) -> bool:
        command = EndReservation(
            call_id=self.call_id(),
            epoch=self.service.epoch,
            instance_id=InstanceId(name),
            incarnation=Incarnation(1),
            reservation_id=reservation_id,
            num_written=num_written,
        )
        return self.ask(command, Done).changed

    def reset(self, identity: Identity | None = None) -> int:
        """Reset an identity, the fleet's own by default; return how many blocks are forgotten."""
        digest = (identity or self.identity).digest()
        command = ResetIdentity(call_id=self.call_id(), identity_digest=digest)
        return self.ask(command, Forgotten).num_blocks

    def open_handoff(self, request: str, prefill: str, decode: str, ttl_s: float = 30.0) -> None:
        self.send(
            OpenHandoff(
                call_id=self.call_id(),
                request_id=RequestId(request),
                prefill_instance=InstanceId(prefill),
                decode_instance=InstanceId(decode),
                ttl_s=ttl_s,
            )
        )

    def close_handoff(self, request: str) -> bool:
        command = CloseHandoff(call_id=self.call_id(), request_id=RequestId(request))
        return self.ask(command, Done).changed

    def describe(self) -> Description:
        return self.ask(Describe(), Description)

    def stats(self, name: str) -> InstanceStats:
        (found,) = [i for i in self.describe().instances if i.info.instance_id == name]
        return found.stats

    def leased_keys(self, lease_id: LeaseId) -> list[tuple[int, BlockHash]]:
        """Return the group and hash of each block of a lease, in its order."""
        (lease,) = [one for one in self.service.state.leases.live() if one.lease_id == lease_id]
        pool = self.service.state.instance(lease.instance_id).manager.pool
        keys = [pool.key_of(block) for block in lease.block_ids]
        return [(group, found) for found, group in (unpack_group(key) for key in keys if key)]

    def num_free(self, name: str) -> int:
        return self.service.state.instance(InstanceId(name)).manager.pool.num_free_blocks

    def free_order(self, name: str) -> list[int]:
        return list(self.service.state.instance(InstanceId(name)).manager.pool.free_order())
