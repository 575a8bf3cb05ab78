"""Reservations as they are asked of the coordinator: repeated, refused, and lost with it."""

import hashlib
from collections.abc import Callable

import pytest
from tests.unit.worker.reserving import FakeCoordinator, new_reserver, reserving

from kvferry.proto.errors import (
    BusyError,
    DeadlineError,
    InvariantError,
    KvferryError,
    NotFoundError,
    NotRegisteredError,
    StaleError,
    UnavailableError,
)
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, Epoch, GroupId, LeaseId
from kvferry.proto.messages import (
    Command,
    Done,
    EndReservation,
    Heard,
    Heartbeat,
    Reply,
    Reserve,
    Reserved,
)
from kvferry.worker.coordinator_reserver import ATTEMPTS, PAUSE_S, CoordinatorReserver
from kvferry.worker.reservations import Reservation

HASHES = tuple(BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(3))


def epoch_of(reserver: CoordinatorReserver) -> int | None:
    """The epoch that its heartbeat names; None where it has to come back instead."""
    coordinator = FakeCoordinator(lambda _: Heard())
    try:
        reserver.beat(coordinator)
    except NotRegisteredError:
        return None
    (beat,) = coordinator.commands
    assert isinstance(beat, Heartbeat)
    assert (beat.instance_id, beat.incarnation) == ("store-0", 7)
    return beat.epoch


def test_reservations_are_asked_of_the_coordinator_in_the_instances_life() -> None:
    coordinator = FakeCoordinator(reserving)
    reserver = new_reserver(coordinator)
    assert reserver.reserve(GroupId(2), HASHES) == Reservation(
        reservation_id=LeaseId("r9"),
        block_ids=(BlockId(1), BlockId(2), BlockId(3)),
        num_resets=5,
    )
    reserver.end(LeaseId("r9"), 2)
    life = {"epoch": 3, "instance_id": "store-0", "incarnation": 7}
    reserve, end = coordinator.commands
    assert isinstance(reserve, Reserve)
    assert isinstance(end, EndReservation)
    for command in (reserve, end):
        assert {name: getattr(command, name) for name in life} == life
    assert (reserve.group_id, reserve.hashes) == (2, HASHES)
    assert (end.reservation_id, end.num_written) == ("r9", 2)
    assert reserve.call_id != end.call_id


def test_an_end_after_a_reset_says_that_nothing_is_kept() -> None:
    reserver = new_reserver(FakeCoordinator(lambda _: Done(changed=False)))
    with pytest.raises(StaleError, match="was reset while this was written"):
        reserver.end(LeaseId("r9"), 2)


def test_a_store_whose_coordinator_does_not_know_it_reserves_nothing_until_it_is_back() -> None:
    def forget(_: Command) -> Reply:
        raise NotRegisteredError("made under another life of the coordinator")

    coordinator = FakeCoordinator(forget)
    lost: list[str] = []
    reserver = new_reserver(coordinator, lambda: lost.append("lost"))
    assert epoch_of(reserver) == 3
    for _ in range(2):
        with pytest.raises(UnavailableError, match="store-0 is coming back"):
            reserver.reserve(FIRST_GROUP, HASHES)
    assert (len(coordinator.commands), lost) == (1, ["lost"])
    assert epoch_of(reserver) is None
    assert reserver.is_quiet()

    coordinator.answer = reserving
    reserver.enter(Epoch(4))
    assert epoch_of(reserver) == 4
    reserver.reserve(FIRST_GROUP, HASHES)
    (_, again) = coordinator.commands
    assert isinstance(again, Reserve)
    assert again.epoch == 4


def test_a_store_that_hears_at_a_heartbeat_that_it_is_not_known_reserves_nothing_more() -> None:
    def forget(_: Command) -> Reply:
        raise NotRegisteredError("unknown instance")

    def too_late(_: Command) -> Reply:
        raise DeadlineError("no answer")

    reserver = new_reserver(FakeCoordinator(reserving))
    with pytest.raises(DeadlineError):
        reserver.beat(too_late)
    assert epoch_of(reserver) == 3
    with pytest.raises(NotRegisteredError, match="unknown instance"):
        reserver.beat(forget)
    with pytest.raises(UnavailableError, match="store-0 is coming back"):
        reserver.reserve(FIRST_GROUP, HASHES)


def test_what_was_written_when_another_life_of_the_coordinator_began_is_kept() -> None:
    coordinator = FakeCoordinator(reserving)
    lost: list[str] = []
    reserver = new_reserver(coordinator, lambda: lost.append("lost"))
    reserver.reserve(FIRST_GROUP, HASHES)
    assert not reserver.is_quiet()

    def forget(_: Command) -> Reply:
        raise NotRegisteredError("made under another life of the coordinator")

    coordinator.answer = forget
    reserver.end(LeaseId("r9"), 2)
    assert lost == ["lost"]
    assert reserver.is_quiet()


@pytest.mark.parametrize(
    ("ask", "answered"),
    [
        (lambda reserver: reserver.end(LeaseId("r9"), 2), Done(changed=True)),
        (
            lambda reserver: reserver.reserve(FIRST_GROUP, HASHES[:1]),
            Reserved(reservation_id=LeaseId("r1"), block_ids=(BlockId(1),), num_resets=0),
        ),
    ],
    ids=["end", "reserve"],
)
def test_a_call_is_repeated_under_its_call_id_until_it_is_answered(
    ask: Callable[[CoordinatorReserver], object], answered: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr("kvferry.worker.coordinator_reserver.time.sleep", pauses_s.append)
    answers: list[Reply | KvferryError]
    answers = [UnavailableError("restarting"), DeadlineError("slow"), answered]

    def answer(_: Command) -> Reply:
        reply = answers.pop(0)
        if isinstance(reply, KvferryError):
            raise reply
        return reply

    coordinator = FakeCoordinator(answer)
    ask(new_reserver(coordinator))
    assert coordinator.commands == [coordinator.commands[0]] * 3
    assert pauses_s == [PAUSE_S] * 2


@pytest.mark.parametrize(
    ("error", "num_attempts"),
    [(UnavailableError("gone"), ATTEMPTS), (BusyError("full"), ATTEMPTS), (NotFoundError("r9"), 1)],
)
def test_an_end_gives_up_after_its_attempts_and_at_once_when_refused(
    error: KvferryError, num_attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.worker.coordinator_reserver.time.sleep", lambda _: None)

    def fail(_: Command) -> Reply:
        raise error

    coordinator = FakeCoordinator(fail)
    reserver = new_reserver(coordinator)
    with pytest.raises(type(error)):
        reserver.end(LeaseId("r9"), 2)
    assert len(coordinator.commands) == num_attempts
    # Unless it was refused, the coordinator may keep the blocks: the store has to tell anew.
    assert epoch_of(reserver) == (None if error.retryable else 3)


def test_a_reply_of_another_kind_is_a_broken_invariant() -> None:
    with pytest.raises(InvariantError, match="given: Done; allowed: Reserved"):
        new_reserver(FakeCoordinator(lambda _: Done(changed=True))).reserve(FIRST_GROUP, HASHES)
