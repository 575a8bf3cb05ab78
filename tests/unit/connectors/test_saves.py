"""What the scheduler half of a connector orders to be saved, and what it says at the end."""

from tests.unit.connectors.made_up import (
    Answers,
    Clock,
    hashes,
    make_request,
    saves,
    scheduled,
)

from kvferry.cluster.connectors.orders import EngineBlocks, SaveOrder
from kvferry.cluster.connectors.prefixes import NOTHING
from kvferry.cluster.connectors.scheduler_half import (
    HANDOFF_POLL_S,
    HANDOFF_WAIT_S,
    NUM_TOKENS_PARAM,
    SchedulerHalf,
)


def test_blocks_are_saved_once_when_they_are_complete(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(0)
    half.match(request, 0)
    half.allocated(request, [5, 6, 7], 0)
    orders = half.step([scheduled([5, 6, 7], 0, 10, starts=True)], is_idle=False)
    assert orders.saves == (
        SaveOrder(
            request_id="r",
            first_block=0,
            hashes=hashes(request)[:2],
            blocks=EngineBlocks(first=0, ids=(5,)),
        ),
    )
    assert orders.overwritten == {5, 6, 7}
    (second,) = saves(half, scheduled([], 10, 10, starts=False))
    assert (second.first_block, second.hashes) == (2, hashes(request)[2:5])
    assert second.blocks == EngineBlocks(first=1, ids=(6, 7))
    assert saves(half, scheduled([], 20, 3, starts=False)) == ()
    (last,) = saves(half, scheduled([], 23, 1, starts=False))
    assert (last.first_block, last.blocks) == (5, EngineBlocks(first=2, ids=(7,)))


def test_what_the_store_has_is_not_saved_again(half: SchedulerHalf, answers: Answers) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(3, num_stored=3)
    assert half.match(request, 0) == 8
    half.allocated(request, [5, 6, 7], 8)
    half.loaded(["r"], frozenset())
    (one,) = saves(half, scheduled([5, 6, 7], 8, 16, starts=True))
    assert one.first_block == 3


def test_nothing_is_saved_before_it_is_known_what_the_store_has_but_all_of_it_at_the_end(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    # All of it is here, so the request does not wait for the answer.
    assert half.match(request, 16) == 0
    half.allocated(request, [5, 6, 7], 0)
    assert saves(half, scheduled([5, 6, 7], 16, 8, starts=True)) == ()
    keeps, _ = half.finished(request, 24, [5, 6, 7])
    assert keeps
    (one,) = half.step([], is_idle=True).saves
    assert (one.first_block, len(one.hashes)) == (0, 6)


def test_placeholders_of_tokens_nobody_knows_yet_are_not_saved(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(7)
    half.match(request, 0)
    answers.answer(0)
    half.allocated(request, [5], 0)
    (one,) = saves(half, scheduled([5], 0, 7, starts=True))
    assert len(one.hashes) == 1
    # Scheduled ahead: token 7 is computed, but its id has not come back.
    assert saves(half, scheduled([], 7, 1, starts=False)) == ()
    request.all_token_ids.append(99)
    (late,) = saves(half, scheduled([6], 8, 1, starts=False))
    assert late.hashes == hashes(request)[1:2]


def test_a_request_that_has_saved_keeps_its_blocks_at_the_end_and_is_told_to_the_workers_once(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(10)
    half.match(request, 0)
    answers.answer(0)
    half.allocated(request, [5, 6], 0)
    half.step([scheduled([5, 6], 0, 10, starts=True)], is_idle=False)
    request.all_token_ids += [7, 8]
    assert half.finished(request, 12, [5, 6]) == (True, None)
    orders = half.step([], is_idle=True)
    assert [save.first_block for save in orders.saves] == [2]
    assert orders.held == {"r"}
    assert half.step([], is_idle=True).held == frozenset()


def test_a_request_without_a_whole_block_keeps_nothing(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(3)
    half.match(request, 0)
    half.allocated(request, [5], 0)
    half.step([scheduled([5], 0, 3, starts=True)], is_idle=False)
    assert half.finished(request, 3, [5]) == (False, None)
    assert half.step([], is_idle=True).held == frozenset()


def test_blocks_of_a_request_that_is_not_cached_are_told_as_overwritten(
    half: SchedulerHalf,
) -> None:
    half.match(make_request(24, keys=None), 0)
    assert half.step([scheduled([5, 6], 0, 9, starts=True)], is_idle=False).overwritten == {5, 6}


def test_a_prefill_for_another_engine_says_how_much_it_saves_and_has_it_kept(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(10, kv_transfer_params={"do_remote_decode": True})
    half.match(request, 0)
    answers.answer(0)
    half.allocated(request, [5, 6], 0)
    keeps, params = half.finished(request, 10, [5, 6])
    assert keeps
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        NUM_TOKENS_PARAM: 8,
    }
    assert answers.kept == [2]


def test_a_prefill_promises_nothing_to_another_engine_while_there_is_no_store(
    half: SchedulerHalf, answers: Answers
) -> None:
    answers.store_address = None
    request = make_request(10, kv_transfer_params={"do_remote_decode": True})
    half.match(request, 0)
    answers.answer(0)
    half.allocated(request, [5, 6], 0)
    assert half.finished(request, 10, [5, 6]) == (True, None)
    assert answers.kept == []


def test_a_decode_waits_for_what_a_prefill_has_announced_but_not_for_ever(
    half: SchedulerHalf, answers: Answers, clock: Clock
) -> None:
    params = {"do_remote_prefill": True, NUM_TOKENS_PARAM: 16}
    request = make_request(20, kv_transfer_params=params)
    assert half.match(request, 0) is None
    answers.answer(2)
    assert half.match(request, 0) is None
    clock.now_s += HANDOFF_POLL_S
    assert half.match(request, 0) is None
    assert half.match(request, 0) is None
    assert len(answers.asked) == 2
    answers.answer(4)
    assert half.match(request, 0) == 16

    other = make_request(20, request_id="o", kv_transfer_params=params)
    half.match(other, 0)
    answers.answer(2)
    assert half.match(other, 0) is None
    clock.now_s += HANDOFF_WAIT_S
    half.match(other, 0)
    answers.answer(2)
    assert half.match(other, 0) == 8


def test_a_decode_does_not_wait_for_a_service_that_is_away(
    half: SchedulerHalf, answers: Answers
) -> None:
    params = {"do_remote_prefill": True, NUM_TOKENS_PARAM: 16}
    request = make_request(20, kv_transfer_params=params)
    half.match(request, 0)
    answers.is_away = True
    answers.open[-1].set_result(NOTHING)
    assert half.match(request, 0) == 0


def test_after_a_reset_nothing_computed_before_it_is_saved(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(0)
    half.allocated(request, [5, 6, 7], 0)
    half.step([scheduled([5, 6, 7], 0, 8, starts=True)], is_idle=False)
    assert not half.is_reset_pending
    assert half.reset()
    assert half.is_reset_pending
    orders = half.step([scheduled([], 8, 8, starts=False)], is_idle=False)
    assert orders.is_reset
    assert not half.is_reset_pending
    assert orders.saves == ()
    assert not half.step([], is_idle=True).is_reset
    answers.resets = False
    assert not half.reset()


def test_nothing_is_looked_up_between_a_reset_and_the_step_that_tells_of_it(
    half: SchedulerHalf, answers: Answers
) -> None:
    assert half.reset()
    assert half.match(make_request(24, request_id="a"), 0) == 0
    assert not answers.asked
    assert half.step([], is_idle=False).is_reset
    assert half.match(make_request(24, request_id="b"), 0) is None
