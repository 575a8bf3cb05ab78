"""What the workload makes of the ends of its requests; the router's answers are made up."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvferry.cluster.serving.requests import Accounting, EngineRequest
from kvferry.cluster.serving.router import Served
from kvferry.cluster.sim.content import KnownContent, answer_of
from kvferry.cluster.sim.workload import Outcomes, Workload
from kvferry.proto.errors import DeadlineError, InvariantError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import InstanceId

WEIGHTS = "1"
SCHEME = make_scheme(hash_block_tokens=4)


def right(request: EngineRequest) -> Served:
    num_tokens = len(request.prompt_token_ids)
    return Served(
        request=request,
        output_token_ids=answer_of(
            request.prompt_token_ids, request.keys, WEIGHTS, request.sampling.max_tokens
        ),
        finish_reason="length",
        accounting=Accounting(
            prompt_tokens=num_tokens,
            local_hit_tokens=0,
            remote_hit_tokens=1,
            computed_tokens=num_tokens - 1,
        ),
        prefill_computed_tokens=0,
        ahead_tokens=0,
        pulled_bytes=0,
        preemptions=0,
        prefill_s=None,
        ttft_s=0.1,
        prefill_instance=None,
        decode_instance=InstanceId("d0"),
    )


def one_request(serve: Callable[[EngineRequest], Served]) -> tuple[Outcomes, list[Exception]]:
    """Let one request end as `serve` says; return what was counted, and what was told."""
    told: list[Exception] = []
    workload = Workload(
        Random(1),
        KnownContent(SCHEME),
        max_model_len=64,
        block_tokens=8,
        pause_s=1e-6,
        violated=told.append,
    )

    class FakeRouter:
        async def serve(self, request: EngineRequest) -> Served:
            workload.is_over = True
            return serve(request)

    router: Any = FakeRouter()
    asyncio.run(workload.run(lambda: (router, WEIGHTS)))
    return workload.outcomes, told


def test_a_right_answer_is_counted_and_nothing_is_told() -> None:
    outcomes, told = one_request(right)
    assert (outcomes.num_right, outcomes.remote_hit_tokens, told) == (1, 1, [])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda served: replace(served, output_token_ids=(0,)), "the answer to r1 is wrong"),
        (
            lambda served: replace(
                served, accounting=replace(served.accounting, remote_hit_tokens=2)
            ),
            "r1: prompt = local [+] remote [+] computed",
        ),
    ],
)
def test_a_wrong_answer_and_tokens_that_do_not_add_up_are_told(
    wrong: Callable[[Served], Served], message: str
) -> None:
    outcomes, told = one_request(lambda request: wrong(right(request)))
    (error,) = told
    assert outcomes.num_right == 0
    with pytest.raises(InvariantError, match=message):
        raise error


def test_an_error_that_is_not_kvferrys_is_told() -> None:
    error = KeyError("d0")

    def fail(_: EngineRequest) -> Served:
        raise error

    outcomes, told = one_request(fail)
    assert (outcomes.num_right, outcomes.failures, told) == (0, [], [error])


def test_a_request_that_is_late_has_failed_and_was_not_given_up() -> None:
    def fail(_: EngineRequest) -> Served:
        raise DeadlineError("late")

    outcomes, told = one_request(fail)
    assert (outcomes.num_given_up, outcomes.failures) == (0, ["r1: DeadlineError: late"])
    assert (told, outcomes.in_flight) == ([], set())


def test_a_request_that_meets_a_broken_kvferry_is_told_and_has_not_just_failed() -> None:
    error = InvariantError("a handoff ended twice")

    def fail(_: EngineRequest) -> Served:
        raise error

    outcomes, told = one_request(fail)
    assert (outcomes.failures, told) == ([], [error])
