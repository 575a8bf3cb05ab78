"""What the scheduler half of a connector promises and orders to be loaded."""

import pytest
from tests.unit.connectors.made_up import (
    PEER,
    Answers,
    Clock,
    hashes,
    make_request,
    scheduled,
)

from kvferry.cluster.connectors.orders import EngineBlocks, HeldPrefix, LoadOrder
from kvferry.cluster.connectors.scheduler_half import SchedulerHalf
from kvferry.cluster.connectors.tracked_request import LOOKUP_VALID_S


def test_a_prefix_is_promised_once_the_answer_is_here_in_whole_blocks_but_the_last_token(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    assert half.match(request, 0) is None
    assert half.match(request, 0) is None
    assert answers.asked == [hashes(request)]
    answers.answer(6)
    # 24 tokens are held, but the last must be computed: two blocks of 8.
    assert half.match(request, 0) == 16
    assert half.match(request, 8) == 8
    assert half.match(request, 16) == 0


@pytest.mark.parametrize(("held", "promised"), [(0, 0), (1, 0), (2, 8), (3, 8), (4, 16)])
def test_a_hit_counts_in_whole_blocks_of_the_engine(
    half: SchedulerHalf, answers: Answers, held: int, promised: int
) -> None:
    request = make_request(30)
    half.match(request, 0)
    answers.answer(held)
    assert half.match(request, 0) == promised


def test_nothing_is_promised_to_a_request_that_may_not_read_or_cannot_be_hashed_or_is_too_short(
    half: SchedulerHalf, answers: Answers
) -> None:
    for request in (
        make_request(24, request_id="a", skip_reading_prefix_cache=True),
        make_request(24, request_id="b", keys=None),
        make_request(3, request_id="c"),
        make_request(8, request_id="d"),
    ):
        assert half.match(request, 0) == 0


def test_an_old_answer_is_asked_for_anew(
    half: SchedulerHalf, answers: Answers, clock: Clock
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(6)
    clock.now_s = LOOKUP_VALID_S
    assert half.match(request, 0) == 16
    clock.now_s += 0.1
    assert half.match(request, 0) is None
    answers.answer(2)
    assert half.match(request, 0) == 8


def test_an_answer_that_took_long_counts_from_when_it_came(
    half: SchedulerHalf, answers: Answers, clock: Clock
) -> None:
    request = make_request(24)
    half.match(request, 0)
    clock.now_s = 10 * LOOKUP_VALID_S
    answers.answer(6)
    clock.now_s += LOOKUP_VALID_S
    assert half.match(request, 0) == 16
    assert len(answers.asked) == 1


def test_an_allocation_orders_the_load_into_its_blocks_once(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    half.match(request, 8)
    answers.answer(6)
    assert half.match(request, 8) == 8
    half.allocated(request, [5, 6, 7], 8)
    orders = half.step([], is_idle=True)
    assert orders.loads == (
        LoadOrder(
            request_id="r",
            first_block=2,
            end_block=4,
            chain=hashes(request),
            blocks=EngineBlocks(first=1, ids=(6,)),
            holders=(HeldPrefix(source=PEER, num_blocks=6),),
        ),
    )
    assert orders.overwritten == {6}
    assert half.step([], is_idle=True).loads == ()
    half.loaded(["r"], frozenset())
    half.allocated(request, [5, 6, 7], 0)
    assert half.step([], is_idle=True).loads == ()


def test_a_request_aborted_while_it_loads_has_its_load_cancelled_and_keeps_nothing_itself(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(6)
    half.match(request, 0)
    half.allocated(request, [5, 6, 7], 16)
    half.step([], is_idle=True)
    assert half.finished(request, 16, [5, 6, 7]) == (False, None)
    orders = half.step([], is_idle=True)
    assert orders.cancelled == {"r"}
    assert orders.held == frozenset()
    half.loaded(["r"], frozenset())


def test_after_a_load_that_failed_the_request_computes(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(6)
    half.match(request, 0)
    half.allocated(request, [5, 6, 7], 16)
    half.loaded(["r"], frozenset({6}))
    assert half.match(request, 0) == 0


def test_a_load_that_one_rank_reports_as_failed_before_the_others_end_has_failed(
    half: SchedulerHalf, answers: Answers
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(6)
    half.match(request, 0)
    half.allocated(request, [5, 6, 7], 16)
    half.loaded([], frozenset({6}))
    half.loaded(["r"], frozenset())
    assert half.match(request, 0) == 0


def test_a_request_that_comes_back_after_a_preemption_may_load_again_and_is_not_counted_again(
    half: SchedulerHalf, answers: Answers, clock: Clock
) -> None:
    request = make_request(24)
    half.match(request, 0)
    answers.answer(0)
    half.match(request, 0)
    half.allocated(request, [5, 6, 7], 0)
    half.step([scheduled([5, 6, 7], 0, 24, starts=True)], is_idle=False)
    assert half.hit_counts() == {
        "external_query_tokens": 24,
        "external_hit_tokens": 0,
        "failed_lookups": 0,
    }
    request.num_preemptions = 1
    clock.now_s = 2 * LOOKUP_VALID_S
    assert half.match(request, 0) is None
    answers.answer(6, num_stored=6)
    assert half.match(request, 0) == 16
    half.allocated(request, [8, 9, 10], 16)
    assert half.hit_counts()["external_hit_tokens"] == 0
    half.loaded(["r"], frozenset())
    orders = half.step([scheduled([8, 9, 10], 16, 8, starts=True)], is_idle=False)
    assert orders.saves == ()
    assert orders.overwritten == {8, 9, 10}
