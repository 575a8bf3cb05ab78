"""Random lives of three small instances and a store; all is checked after every command."""

import contextlib
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.unit.coordinator.engine_model import Behaviour, EngineModel
from tests.unit.coordinator.fleet import BLOCK_TOKENS, HYBRID, IDENTITY, Fleet, admit, chain
from tests.unit.coordinator.returning import come_back, require_same
from tests.unit.coordinator.told import Told

from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BusyError, NotFoundError, UnavailableError
from kvferry.proto.ids import InstanceId, LeaseId, RequestId
from kvferry.proto.messages import ReleaseLease, RenewLease, Tick

NAMES = ("a", "b", "c")
STORE = "store"
NUM_BLOCKS = 7
TEXTS = ("", "x", "xy", "xyz", "xyzw", "pq")
names = st.sampled_from(NAMES)
texts = st.sampled_from(TEXTS)
behaviours = st.builds(
    Behaviour,
    budget=st.sampled_from([100, 6, 3, 0]),
    grow=st.sampled_from([True, True, False]),
    ahead=st.sampled_from([0, 0, 5]),
    handoff=st.booleans(),
    end=st.frozensets(st.integers(0, 9), max_size=1),
    arrived=st.lists(st.sampled_from([9, 1, 0]), max_size=2).map(tuple),
    error_type=st.sampled_from(["UnavailableError", "NotFoundError"]),
)
LEASE_CAP_S = 20.0


class ServiceMachine(RuleBasedStateMachine):
    identity = IDENTITY
    covers: ClassVar = {"a": 1, "b": 1, "c": 1}
    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(
            identity=self.identity,
            step_lease_s=5.0,
            lease_cap_s=LEASE_CAP_S,
            sample_block_every=2,
            tells_pool_events=True,
        )
        self.told = Told()
        self.engines: dict[str, EngineModel] = {}
        self.lives: Counter[str] = Counter()
        self.reservations: list[tuple[str, LeaseId, int, float]] = []
        self.lease_ids: list[LeaseId] = []
        self.num_requests = 0

    @initialize()
    def all_are_there_and_one_is_warm(self) -> None:
        for name in NAMES:
            self._register(name)
        self.fleet.register(STORE, num_blocks=self.num_blocks, role="store", max_model_len=0)
        self.fleet.cache("a", "xyz")

    @rule(
        name=names,
        new=st.lists(texts, max_size=2),
        remote=st.sampled_from([True, True, False]),
        does=behaviours,
    )
    def step(self, name: str, new: list[str], remote: bool, does: Behaviour) -> None:
        self._queue(name, new, remote)
        self.engines[name].step(self.fleet, name, does)

    @rule(name=names, new=st.lists(texts, max_size=1), times=st.integers(2, 8))
    def run_for_a_while(self, name: str, new: list[str], times: int) -> None:
        self._queue(name, new, remote=True)
        for _ in range(times):
            self.engines[name].step(self.fleet, name, Behaviour())

    @rule(name=names, seconds=st.sampled_from([0.5, 3.0, 30.0]), announced=st.booleans())
    def a_process_dies_and_another_comes(self, name: str, seconds: float, announced: bool) -> None:
        # Without an announcement the next life's registration takes the old one's place.
        if seconds == 30.0:
            if announced:
                assert self.fleet.remove(name, incarnation=self.lives[name])
            self._register(name)
        else:
            self.fleet.now += seconds
            self.fleet.send(Tick())
            for living in (*NAMES, STORE):
                self.fleet.beat(living, self.lives[living] or 1)

    @rule(silent=st.frozensets(st.sampled_from([*NAMES, STORE])))
    def some_are_not_heard(self, silent: frozenset[str]) -> None:
        state = self.fleet.service.state
        # Who was silent before is heard once, so that nobody dies.
        for name in sorted(silent):
            self.fleet.beat(name, self.lives[name] or 1)
        for _ in range(2):
            self.fleet.now += 1.0
            self.fleet.send(Tick())
            for name in sorted({*NAMES, STORE} - silent):
                self.fleet.beat(name, self.lives[name] or 1)
        for name in (*NAMES, STORE):
            assert state.instances[InstanceId(name)].is_suspect == (name in silent)

    @rule(text=texts, ttl_s=st.sampled_from([1.0, 8.0, 50.0]), end=st.booleans())
    def lease(self, text: str, ttl_s: float, end: bool) -> None:
        leased = self.fleet.lease(text, ttl_s)
        if leased.lease_id is not None:
            assert 1 <= leased.num_hashes <= len(text)
            self.lease_ids.append(leased.lease_id)
        if not self.lease_ids:
            return
        lease_id = self.lease_ids.pop(0)
        if end:
            self.fleet.send(ReleaseLease(call_id=self.fleet.call_id(), lease_id=lease_id))
        else:
            renew = RenewLease(call_id=self.fleet.call_id(), lease_id=lease_id, ttl_s=3.0)
            try:
                self.fleet.send(renew)
            except NotFoundError:
                assert lease_id not in self._live_leases()

    @rule(
        name=st.sampled_from([*NAMES, STORE]),
        text=texts,
        written=st.integers(0, 4),
        end=st.booleans(),
        number=st.integers(0, 3),
    )
    def store(self, name: str, text: str, written: int, end: bool, number: int) -> None:
        if name == STORE or (self.lives[name] == 1 and self.covers[name] == 1):
            # A pool that is too full refuses and, as the checks show, changes nothing.
            with contextlib.suppress(BusyError):
                reserved = self.fleet.reserve(name, text, number % len(self.identity.groups))
                deadline_s = self.fleet.now + LEASE_CAP_S
                kept = name, reserved.reservation_id, len(text), deadline_s
                self.reservations.append(kept)
        if end and self.reservations:
            self._end_reservation(written)

    @rule(texts=st.lists(texts, max_size=2))
    def reset(self, texts: list[str]) -> None:
        before = [self.fleet.reserve(STORE, text) for text in texts if self._fits(text)]
        self.fleet.reset()
        for reserved in before:
            num_blocks = len(reserved.block_ids)
            assert not self.fleet.end_reservation(STORE, reserved.reservation_id, num_blocks)
        manager = self.fleet.service.state.instances[InstanceId(STORE)].manager
        assert manager.pool.num_cached_blocks == 0

    @precondition(lambda self: self.fleet.service.epoch == 1)  # once is enough, and it takes long
    @rule(order=st.permutations([*NAMES, STORE]), lease=st.booleans())
    def the_coordinator_restarts(self, order: list[str], lease: bool) -> None:
        before = self.fleet.restart()
        self.reservations.clear()
        for engine in self.engines.values():
            engine.come_back()
        for name in order:
            for command in come_back(self.fleet, before, name):
                self.fleet.send(command)
                # Others may use what has been told so far.
                leased = self.fleet.lease("xyzw", 3.0) if lease else None
                if leased is not None and leased.lease_id is not None:
                    self.lease_ids.append(leased.lease_id)
            require_same(before, self.fleet.service, name)

    @rule(prefill=names, decode=names, number=st.integers(0, 3), close=st.booleans())
    def hand_over(self, prefill: str, decode: str, number: int, close: bool) -> None:
        request = f"r{max(self.num_requests - number, 1)}"
        if close:
            self.fleet.close_handoff(request)
        else:
            self._open_handoff(request, prefill, decode)

    @rule(prefill=names, decode=names, text=st.sampled_from(["xyzw", "pq", "zzz"]))
    def prefill_here_and_decode_there(self, prefill: str, decode: str, text: str) -> None:
        self.num_requests += 1
        request = f"r{self.num_requests}"
        self._open_handoff(request, prefill, decode)
        self.engines[decode].follow(admit(request, text))
        if prefill != decode:
            self.engines[prefill].waiting.append(admit(request, text))

    @invariant()
    def the_engines_and_the_coordinator_agree(self) -> None:
        for name, engine in self.engines.items():
            instance = self.fleet.service.state.instances[InstanceId(name)]
            assert set(instance.requests) == {*engine.running, *engine.loading}
            assert set(instance.loads) == set(engine.loading)
            not_told = {ask.request_id for ask in engine.not_told}
            assert set(instance.followers) == set(engine.following) - not_told

    @invariant()
    def a_follower_holds_nothing_unless_it_loads(self) -> None:
        for name, engine in self.engines.items():
            instance = self.fleet.service.state.instances[InstanceId(name)]
            for request_id in engine.following.keys() - engine.loading.keys():
                assert instance.blocks_of(request_id) == []

    @invariant()
    def whoever_asks_finds_what_the_pool_itself_would_hit(self) -> None:
        for text in ("xyzw", "pq"):
            located = self.fleet.located(text)
            lengths = {str(one.source.instance_id): one.num_hashes for one in located.holders}
            for name in self.engines:
                if self.fleet.service.state.instances[InstanceId(name)].is_suspect:
                    assert name in located.avoid
                    assert name not in lengths
                    continue
                manager = self.fleet.service.state.instances[InstanceId(name)].manager
                request = RequestState(
                    request_id=RequestId("probe"),
                    num_tokens=len(text) * BLOCK_TOKENS + 1,
                    hashes=list(chain(text)),
                )
                _, num_tokens = manager.get_computed_blocks(request)
                assert lengths[name] * BLOCK_TOKENS == num_tokens

    @invariant()
    def what_is_told_is_what_the_pools_have(self) -> None:
        self.told.follow(self.fleet.service.take_pool_events())
        for name in self.engines:
            pool = self.fleet.service.state.instances[InstanceId(name)].manager.pool
            have = {key: len(blocks) for key, blocks in pool.index_items()}
            assert self.told.copies[name] == have

    def teardown(self) -> None:
        """Left alone, every request ends, and all blocks are free then."""
        while self.reservations:
            self._end_reservation(0)
        self.fleet.now += 100.0
        for name, engine in self.engines.items():
            for _ in range(10 * (self.num_requests + 1)):
                if not engine.is_idle:
                    done = Behaviour(grow=False, finish=True, arrived=(9,) * 20)
                    waited = engine.waiting and not (engine.running or engine.loading)
                    engine.step(self.fleet, name, done)
                    # Something runs, or loads: except in the step in which the last gave way.
                    assert engine.running or engine.loading or not (waited and engine.waiting)
            assert engine.is_idle
        self.fleet.now += 100.0
        self.fleet.send(Tick())
        assert self.fleet.num_free(STORE) == self.num_blocks - 1
        for name in self.engines:
            assert self.fleet.num_free(name) == self.num_blocks - 1
            stats = self.fleet.stats(name)
            assert (stats.first.pending, stats.preempted.pending) == (0, 0)
        assert self.fleet.describe().num_leases == 0
        assert self.fleet.describe().num_handoffs == 0

    def _register(self, name: str) -> None:
        self.lives[name] += 1
        self.fleet.register(
            name,
            num_blocks=self.num_blocks,
            incarnation=self.lives[name],
            covers=self.covers[name],
        )
        self.engines[name] = EngineModel(
            partial_loads=len(self.identity.groups) == 1,
            block_tokens=self.covers[name] * BLOCK_TOKENS,
        )
        self.reservations = [kept for kept in self.reservations if kept[0] != name]

    def _open_handoff(self, request: str, prefill: str, decode: str) -> None:
        is_suspect = self.fleet.service.state.instances[InstanceId(prefill)].is_suspect
        with pytest.raises(UnavailableError) if is_suspect else contextlib.nullcontext():
            self.fleet.open_handoff(request, prefill, decode, ttl_s=6.0)

    def _queue(self, name: str, new: list[str], remote: bool) -> None:
        for text in new:
            self.num_requests += 1
            ask = admit(f"r{self.num_requests}", text, allow_remote=remote)
            self.engines[name].waiting.append(ask)

    def _end_reservation(self, written: int) -> None:
        name, reservation_id, size, deadline_s = self.reservations.pop(0)
        has_expired = deadline_s <= self.fleet.now
        with pytest.raises(NotFoundError) if has_expired else contextlib.nullcontext():
            self.fleet.end_reservation(name, reservation_id, min(written, size))

    def _fits(self, text: str) -> bool:
        return self.fleet.num_free(STORE) >= len(text)

    def _live_leases(self) -> list[LeaseId]:
        return [lease.lease_id for lease in self.fleet.service.state.leases.live()]


class HybridMachine(ServiceMachine):
    """The same with four groups: full, sliding window, chunked local and a recurrent state."""

    identity = HYBRID
    num_blocks = 4 * NUM_BLOCKS


class MixedMachine(ServiceMachine):
    """One group, and blocks of one hash, two and three."""

    covers: ClassVar = {"a": 1, "b": 2, "c": 3}


class MixedHybridMachine(HybridMachine):
    """Four groups, and blocks of one hash and of two."""

    covers: ClassVar = {"a": 1, "b": 2, "c": 2}


TestMixedHybrid = MixedHybridMachine.TestCase
TestMixedHybrid.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestMixed = MixedMachine.TestCase
TestMixed.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestService = ServiceMachine.TestCase
TestService.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
