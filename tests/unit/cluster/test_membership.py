"""An engine asks until it is answered, and tells what there is to whoever does not know it."""

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.builders import make_info

from kvferry.cluster.serving import membership
from kvferry.cluster.serving.membership import Membership, Stage
from kvferry.proto.errors import (
    BadInputError,
    DeadlineError,
    KvferryError,
    NotRegisteredError,
    RestoringError,
    StaleError,
    UnavailableError,
)
from kvferry.proto.ids import BlockHash, BlockId, Epoch, GroupId, RequestId
from kvferry.proto.messages import Command, Done, Registered, RegisterInstance, Reply
from kvferry.proto.restore_messages import RestoreBlocks, RestoredRequest, RestoreRequests
from kvferry.proto.step_messages import Step, StepReply
from kvferry.worker.inventory import InventoryPart

INFO = make_info("d")
STEP = Step(
    call_id="s",
    epoch=Epoch(3),
    instance_id=INFO.instance_id,
    incarnation=INFO.incarnation,
    token_budget=1,
)
NOT_KNOWN = NotRegisteredError("unknown instance")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(membership, "LONGEST_PAUSE_S", 0.002)


class Scripted:
    """A coordinator that answers with these, one after the other, and then well."""

    def __init__(self, *answers: Reply | KvferryError, epoch: int = 4) -> None:
        self.asked: list[Command] = []
        self.before_answer: Callable[[], None] = lambda: None
        self._answers = list(answers)
        self._epoch = Epoch(epoch)

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        assert timeout_s == 10.0
        self.asked.append(command)
        self.before_answer()
        if self._answers:
            answer = self._answers.pop(0)
            if isinstance(answer, KvferryError):
                raise answer
            return answer
        if isinstance(command, RegisterInstance):
            return Registered(epoch=self._epoch)
        return StepReply() if isinstance(command, Step) else Done(changed=True)


def member(coordinator: Scripted, epoch: int = 3) -> Membership:
    return Membership(INFO, Epoch(epoch), coordinator)


def part(number: int) -> InventoryPart:
    return InventoryPart(GroupId(0), [BlockHash(bytes([number]) * 32)], [BlockId(number)])


def held(max_blocks: int) -> Iterator[InventoryPart]:
    assert max_blocks == 16_384
    yield part(1)
    yield part(2)


def running(name: str, num_blocks: int) -> RestoredRequest:
    return RestoredRequest(
        request_id=RequestId(name),
        num_tokens=1,
        num_computed_tokens=1,
        hashes=(),
        block_ids=((BlockId(1),) * num_blocks,),
    )


def test_the_same_step_is_asked_until_there_is_an_answer() -> None:
    coordinator = Scripted(UnavailableError("away"), DeadlineError("late"), StepReply())
    made = member(coordinator)
    assert made.ask(STEP) == StepReply()
    assert coordinator.asked == [STEP] * 3
    assert made.stage is Stage.MEMBER


def test_a_refusal_is_told_at_once() -> None:
    for refusal in (BadInputError("no"), StaleError("another incarnation")):
        coordinator = Scripted(refusal)
        with pytest.raises(type(refusal)):
            member(coordinator).ask(STEP)
        assert len(coordinator.asked) == 1


@pytest.mark.parametrize("error", [NOT_KNOWN, RestoringError("told half of it")])
def test_who_is_not_known_has_to_come_back(error: KvferryError) -> None:
    made = member(Scripted(error))
    assert made.ask(STEP) is None
    assert made.stage is Stage.LOST


def test_blocks_and_then_requests_are_told_under_the_new_epoch() -> None:
    coordinator = Scripted()
    made = member(coordinator)
    made.tell_blocks(held)
    assert (made.stage, made.epoch) == (Stage.BLOCKS_TOLD, 4)
    made.tell_requests([running("r", 3)])
    assert made.stage is Stage.MEMBER
    register, first, second, last = coordinator.asked
    assert register == RegisterInstance(call_id="d/1/return/1", info=INFO, returning=True)
    for command, number in ((first, 1), (second, 2)):
        assert isinstance(command, RestoreBlocks)
        assert (command.hashes, command.block_ids) == (tuple(part(number)[1]), (number,))
        assert command.registration == "d/1/return/1"
    assert isinstance(last, RestoreRequests)
    assert (names(last), last.is_last) == (["r"], True)
    assert last.registration == "d/1/return/1"
    assert [command.epoch for command in (first, second, last)] == [4, 4, 4]  # type: ignore[union-attr]
    call_ids = [command.call_id for command in (register, first, second)]  # type: ignore[union-attr]
    assert len(set(call_ids)) == 3


def test_without_requests_that_is_told() -> None:
    coordinator = Scripted()
    made = member(coordinator)
    made.tell_requests(())
    (told,) = coordinator.asked
    assert isinstance(told, RestoreRequests)
    assert (told.requests, told.is_last) == ((), True)


def test_requests_are_told_in_messages_of_a_bounded_size() -> None:
    coordinator = Scripted()
    made = member(coordinator)
    made.tell_requests(
        running(name, size)
        for name, size in (("a", 40_000), ("b", 25_000), ("c", 1000), ("d", 70_000))
    )
    told = [one for one in coordinator.asked if isinstance(one, RestoreRequests)]
    assert [names(one) for one in told] == [["a", "b"], ["c"], ["d"]]
    assert [one.is_last for one in told] == [False, False, True]


def test_who_is_lost_again_meanwhile_starts_over_with_other_calls() -> None:
    coordinator = Scripted(Registered(epoch=Epoch(4)), Done(changed=True), NOT_KNOWN, epoch=5)
    made = member(coordinator)
    made.tell_blocks(held)
    assert made.stage is Stage.LOST
    made.tell_blocks(held)
    assert (made.stage, made.epoch) == (Stage.BLOCKS_TOLD, 5)
    registers = [one.call_id for one in coordinator.asked if isinstance(one, RegisterInstance)]
    assert registers == ["d/1/return/1", "d/1/return/2"]


def test_a_coordinator_of_an_earlier_life_is_told_nothing() -> None:
    coordinator = Scripted(NOT_KNOWN, epoch=2)
    made = member(coordinator)
    made.ask(STEP)
    made.tell_blocks(held)
    assert (made.stage, made.epoch) == (Stage.LOST, 3)
    assert [type(one) for one in coordinator.asked] == [Step, RegisterInstance]


def test_whoever_asks_gives_up_when_the_engine_stops() -> None:
    asked = threading.Event()
    coordinator = Scripted(*[UnavailableError("away")] * 10_000)
    coordinator.before_answer = asked.set
    made = member(coordinator)
    ended: list[KvferryError] = []

    def ask() -> None:
        try:
            made.ask(STEP)
        except KvferryError as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(10.0)
    made.stop()
    asking.join(10.0)
    assert [error.message for error in ended] == ["d/1 stops while it waits for the coordinator"]


def names(told: RestoreRequests) -> list[str]:
    return [one.request_id for one in told.requests]
