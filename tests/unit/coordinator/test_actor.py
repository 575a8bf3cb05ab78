"""The shell: lock, clock, ticks, front."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from tests.unit.coordinator.fleet import IDENTITY, SCHEME, Fleet, admit, chain, info, wrote

from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.pool_events import PoolEvent
from kvferry.coordinator.registry import Memory, ProcessRegistry
from kvferry.proto.errors import BadInputError, PortTakenError, StaleError, UnavailableError
from kvferry.proto.ids import Epoch, Incarnation, InstanceId
from kvferry.proto.messages import (
    AcquireLease,
    Command,
    Describe,
    Description,
    KvEventsPlace,
    Leased,
    Registered,
    RegisterInstance,
    Reply,
    Reserve,
    Reserved,
    ResetIdentity,
    Tick,
)


class RecordingFront:
    address = "127.0.0.1:1"

    def __init__(self, call: Callable[[Command], Reply]) -> None:
        self.call = call
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def actor() -> Iterator[CoordinatorActor]:
    actor = CoordinatorActor(scheme=SCHEME, registry=ProcessRegistry(), tick_interval_s=0.01)
    yield actor
    actor.stop()


def test_the_constructor_accepts_anything_and_start_refuses_it() -> None:
    actor = CoordinatorActor(scheme=SCHEME, registry=ProcessRegistry(), lease_cap_s=-1.0)
    with pytest.raises(BadInputError, match="lease_cap_s"):
        actor.start()


def test_commands_are_refused_before_the_start_and_after_the_stop(
    actor: CoordinatorActor,
) -> None:
    with pytest.raises(UnavailableError, match="not running"):
        actor.call(Tick())
    assert actor.start() == 1
    assert isinstance(actor.call(Describe()), Description)
    actor.stop()
    with pytest.raises(UnavailableError, match="not running"):
        actor.call(Tick())
    with pytest.raises(UnavailableError, match="stopped"):
        actor.start()


def test_a_second_start_keeps_the_running_service(actor: CoordinatorActor) -> None:
    actor.start()
    command = RegisterInstance(call_id="1", info=info("a"))
    assert actor.call(command) == Registered(epoch=Epoch(1))
    assert actor.start() == 1
    described = actor.call(Describe())
    assert isinstance(described, Description)
    assert len(described.instances) == 1


RESET = ResetIdentity(call_id="reset", identity_digest=IDENTITY.digest())


def reserve_one(life: CoordinatorActor) -> Reserved:
    """What a new store is told with its first reservation."""
    life.call(RegisterInstance(call_id="1", info=info("s", role="store", max_model_len=0)))
    reserved = life.call(
        Reserve(
            call_id="r",
            epoch=life.start(),
            instance_id=InstanceId("s"),
            incarnation=Incarnation(1),
            hashes=chain("x"),
        )
    )
    assert isinstance(reserved, Reserved)
    return reserved


def test_a_life_has_the_next_epoch_and_the_resets_of_those_before() -> None:
    registry = ProcessRegistry()
    lives = [CoordinatorActor(scheme=SCHEME, registry=registry) for _ in range(3)]
    for number, life in enumerate(lives, start=1):
        assert life.start() == number
        if number < 3:
            life.call(RESET)
    assert reserve_one(lives[2]).num_resets == 2
    with pytest.raises(StaleError, match="later life") as refused:
        lives[1].call(replace(RESET, call_id="late"))
    assert (refused.value.given, refused.value.allowed) == (2, 3)
    for life in lives:
        life.stop()


def test_a_reset_that_could_not_be_remembered_is_when_it_is_repeated() -> None:
    class Forgetful(ProcessRegistry):
        is_away = True

        def save(self, memory: Memory) -> None:
            if self.is_away:
                raise UnavailableError("away")
            super().save(memory)

    registry = Forgetful()
    first = CoordinatorActor(scheme=SCHEME, registry=registry)
    first.start()
    with pytest.raises(UnavailableError, match="away"):
        first.call(RESET)
    registry.is_away = False
    first.call(RESET)
    assert registry.begin().resets == {IDENTITY.digest(): 1}
    first.stop()


def test_deadlines_pass_without_any_command(actor: CoordinatorActor) -> None:
    actor.start()
    fleet = Fleet()
    actor.call(RegisterInstance(call_id="reg", info=info("a")))
    for step in (
        fleet.make_step("a", waiting=(admit("r", "x"),)),
        fleet.make_step("a", progress=(wrote("r", 5, 5),)),
    ):
        actor.call(step)
    leased = actor.call(
        AcquireLease(
            call_id="lease", identity_digest=IDENTITY.digest(), hashes=chain("x"), ttl_s=0.05
        )
    )
    assert isinstance(leased, Leased)
    assert leased.num_hashes == 1
    deadline_s = time.monotonic() + 5.0
    service = actor._service
    assert service is not None
    while len(service.state.leases) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(service.state.leases) == 0


def test_the_front_gets_the_call_function_and_is_stopped(actor: CoordinatorActor) -> None:
    fronts: list[RecordingFront] = []

    def front(call: Callable[[Command], Reply]) -> RecordingFront:
        fronts.append(RecordingFront(call))
        return fronts[0]

    assert actor.front_address() is None
    actor.start(front)
    assert actor.front_address() == "127.0.0.1:1"
    assert isinstance(fronts[0].call(Describe()), Description)
    actor.stop()
    assert fronts[0].stopped


def test_a_front_that_cannot_start_stops_the_coordinator(actor: CoordinatorActor) -> None:
    def front(call: Callable[[Command], Reply]) -> RecordingFront:
        raise PortTakenError("taken")

    with pytest.raises(PortTakenError):
        actor.start(front)
    with pytest.raises(UnavailableError, match="not running"):
        actor.call(Describe())


class RecordingOutlet:
    """Has room for one instance."""

    def __init__(self) -> None:
        self.opened: list[InstanceId] = []
        self.published: list[tuple[str, str]] = []
        self.due: list[InstanceId] = []
        self.closed = False

    def open(self, instance_id: InstanceId) -> None:
        if self.opened not in ([], [instance_id]):
            raise PortTakenError("taken")
        self.opened = [instance_id]

    def publish(self, instance_id: InstanceId, events: Sequence[PoolEvent]) -> None:
        self.published += [(instance_id, type(event).__name__) for event in events]

    def place(self, instance_id: InstanceId) -> KvEventsPlace:
        return KvEventsPlace(endpoint="e", replay_endpoint=None, topic=instance_id)

    def due_snapshots(self) -> list[InstanceId]:
        due, self.due = self.due, []
        return due

    def close(self) -> None:
        self.closed = True


def test_what_pools_do_goes_to_the_outlet_in_order(actor: CoordinatorActor) -> None:
    outlet = RecordingOutlet()
    actor.start(outlet=lambda: outlet)
    registered = actor.call(RegisterInstance(call_id="reg", info=info("a")))
    assert registered == Registered(epoch=Epoch(1), wants_content=True)
    fleet = Fleet()
    actor.call(fleet.make_step("a", waiting=(admit("r", "x"),)))
    actor.call(fleet.make_step("a", progress=(wrote("r", 5, 5),)))
    assert outlet.published == [("a", "Cleared"), ("a", "Stored")]
    described = actor.call(Describe())
    assert isinstance(described, Description)
    assert [i.kv_events for i in described.instances] == [outlet.place(InstanceId("a"))]
    outlet.due = [InstanceId("a")]
    actor.call(Tick())
    assert outlet.published[2:] == [("a", "Cleared"), ("a", "Stored")]
    actor.stop()
    assert outlet.closed


def test_an_instance_whose_events_cannot_be_published_is_refused(actor: CoordinatorActor) -> None:
    actor.start(outlet=RecordingOutlet)
    actor.call(RegisterInstance(call_id="1", info=info("a")))
    with pytest.raises(PortTakenError):
        actor.call(RegisterInstance(call_id="2", info=info("b")))
    described = actor.call(Describe())
    assert isinstance(described, Description)
    assert [i.info.instance_id for i in described.instances] == ["a"]
