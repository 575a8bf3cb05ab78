"""The parts of a chaos run that need no cluster: faults, what is asked, counts, verdict."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from tests.builders import make_info

from kvferry.cluster import cli
from kvferry.cluster.chaos.book import ANSWER_TOKENS, TURNS, Conversation, write_conversations
from kvferry.cluster.chaos.counts import Counts, count, differences
from kvferry.cluster.chaos.faults import KINDS, MAX_CALM_S, PAUSES_S, Fault, faults
from kvferry.cluster.chaos.plan import ChaosPlan
from kvferry.cluster.chaos.report import ChaosResult, Struck, to_json
from kvferry.cluster.chaos.traffic import Tally, Traffic, request
from kvferry.cluster.serving.requests import Accounting, EngineRequest
from kvferry.cluster.serving.router import Served
from kvferry.proto.errors import BadInputError, InstanceDiedError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import Epoch, InstanceId
from kvferry.proto.instance_stats import Held, InstanceStats
from kvferry.proto.messages import Description, InstanceStatus

PROMPT, ANSWER = (1, 2, 3), tuple(range(ANSWER_TOKENS))
PLAN = ChaosPlan(minutes=2.0, seed=7, model="", kinds=KINDS)
MIB = 1 << 20
AT_REST = Counts(
    instances=3,
    used_blocks=0,
    requests=0,
    leases=0,
    handoffs=0,
    reservations=0,
    loads=0,
    processes={"RankActor": 3, "raylet": 4},
    files={"asker": 40, "RankActor": 90},
    sockets={"asker": 12},
    memory_bytes={"asker": 100 * MIB, "RankActor": 200 * MIB, "RayCoordinatorActor": 50 * MIB},
)

# -- faults ---------------------------------------------------------------------------------------


def test_a_seed_decides_all_faults_and_every_kind_comes_once_a_round() -> None:
    first = list(islice(faults(7), 3 * len(KINDS)))
    assert first == list(islice(faults(7), 3 * len(KINDS)))
    assert first != list(islice(faults(8), 3 * len(KINDS)))
    for begin in range(0, len(first), len(KINDS)):
        assert {one.kind for one in first[begin : begin + len(KINDS)]} == set(KINDS)
    assert all(0 <= one.calm_s <= MAX_CALM_S and one.pause_s in PAUSES_S for one in first)


def make_fault(kind: str, choice: float = 0.0) -> Fault:
    return Fault(kind=kind, calm_s=0.0, choice=choice, pause_s=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("choice", "victim"), [(0.0, "a"), (0.4, "b"), (0.999, "c")])
def test_a_faults_choice_names_each_victim_alike(choice: float, victim: str) -> None:
    assert make_fault("kill_node", choice).victim(["a", "b", "c"]) == victim


# -- counts ---------------------------------------------------------------------------------------


def description(
    *, held: Held | None = None, num_used_blocks: int = 0, rank_pids: tuple[int, ...] = (1,)
) -> Description:
    status = InstanceStatus(
        info=make_info("decode-0", rank_pids=rank_pids),
        num_used_blocks=num_used_blocks,
        num_free_blocks=9,
        num_cached_blocks=4,
        num_requests=0,
        stats=InstanceStats(),
        held=held or Held(),
    )
    return Description(
        epoch=Epoch(1),
        scheme=make_scheme(hash_block_tokens=4),
        instances=(status,),
        num_leases=0,
        num_handoffs=0,
    )


def test_a_service_is_at_rest_when_nothing_is_held_for_anybody() -> None:
    assert count(description(), (), os.getpid()).is_at_rest
    assert not count(description(num_used_blocks=1), (), os.getpid()).is_at_rest
    assert not count(description(held=Held(reservations=1)), (), os.getpid()).is_at_rest


def test_what_has_not_come_back_is_told_and_memory_and_files_have_a_margin() -> None:
    assert differences(AT_REST, AT_REST) == ()
    # Of three ranks and one asker.
    within = replace(AT_REST, files={"asker": 41, "RankActor": 93}, sockets={"asker": 11})
    assert differences(AT_REST, within) == ()
    grown = AT_REST.memory_bytes | {"asker": 131 * MIB, "RankActor": 247 * MIB}
    after = replace(
        within, leases=1, files={"RankActor": 94}, sockets={"asker": 14}, memory_bytes=grown
    )
    assert differences(AT_REST, after) == (
        "leases were 0 and are 1",
        "files of RankActor were 90 and are 94",
        "sockets of asker were 12 and are 14",
        "memory of RankActor was 200 MiB and is 247 MiB",
    )


# -- what is asked --------------------------------------------------------------------------------


class Letters:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def test_conversations_share_documents_and_every_turn_begins_with_the_last_one_and_its_answer() -> (
    None
):
    conversations = write_conversations(Letters(), 7)
    again = write_conversations(Letters(), 7)
    assert [one.document for one in again] == [one.document for one in conversations]
    assert conversations[0].document == conversations[1].document != conversations[3].document
    one = conversations[0]
    for number, prompt in enumerate(one.write()):
        if number:
            assert prompt[: len(one.prompts[-2])] == one.prompts[-2]
            assert prompt[len(one.prompts[-2]) :][:2] == (number, 5)
        one.answers.append((number + 1, 5))
    assert len(one.prompts) == len(one.answers) == TURNS


class FakeRouter:
    """Answers with what is put into `answers`, one after the other; errors are raised."""

    def __init__(self, *answers: tuple[int, ...] | Exception) -> None:
        self.answers = list(answers)

    async def serve(self, request: EngineRequest) -> Served:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return served(request, answer)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[int | Served]:
        for token in ANSWER:
            yield token
        yield served(request, ANSWER)


def served(request: EngineRequest, answer: tuple[int, ...]) -> Served:
    return Served(
        request=request,
        output_token_ids=answer,
        finish_reason="length",
        accounting=Accounting(
            prompt_tokens=3, local_hit_tokens=1, remote_hit_tokens=1, computed_tokens=1
        ),
        prefill_computed_tokens=0,
        ahead_tokens=0,
        pulled_bytes=0,
        preemptions=0,
        prefill_s=None,
        ttft_s=0.1,
        prefill_instance=None,
        decode_instance=InstanceId("decode-0"),
    )


def tally_of(*answers: tuple[int, ...] | Exception) -> Tally:
    """Everything is asked once: two prompts by different callers."""
    conversations = [Conversation((1,), ((2, 3),), [PROMPT], [ANSWER]) for _ in range(2)]
    router: Any = FakeRouter(*answers)
    traffic = Traffic(router, conversations, seed=7)
    asyncio.run(traffic.everything())
    assert router.answers == []
    return traffic.tally


def test_a_failed_request_is_asked_once_more_and_counted() -> None:
    died = InstanceDiedError("gone", given="decode-0")
    tally = tally_of(died, ANSWER, ANSWER)
    assert (tally.served, tally.retried, dict(tally.failed)) == (2, 1, {"InstanceDiedError": 1})
    assert (tally.unclear, tally.differences) == ([], [])


@pytest.mark.parametrize("error", [BadInputError("you"), ValueError("odd"), TimeoutError()])
def test_an_error_that_nobody_may_see_is_a_problem(error: Exception) -> None:
    tally = tally_of(error, ANSWER, ANSWER)
    assert len(tally.unclear) == 1
    assert not tally.failed
    assert result(tally).problems == tuple(tally.unclear)


def test_a_request_that_fails_twice_when_nothing_is_wrong_any_more_is_a_problem() -> None:
    died = InstanceDiedError("gone", given="decode-0")
    tally = tally_of(died, died, ANSWER)
    assert (tally.served, tally.retried) == (1, 1)
    assert tally.unclear == ["a request failed twice, after the last fault"]


@pytest.mark.parametrize("output", [(), ANSWER[:-1], (*ANSWER, 7)])
def test_no_near_tie_explains_an_output_of_another_length(output: tuple[int, ...]) -> None:
    tally = tally_of(ANSWER, output)
    assert tally.unclear == [f"an output has {len(output)} tokens instead of {len(ANSWER)}"]
    assert tally.differences == []


def test_a_request_whose_tokens_came_from_nowhere_is_a_problem() -> None:
    tally = Tally()
    asked = request("r", PROMPT, salt="s")
    nowhere = Accounting(
        prompt_tokens=3, local_hit_tokens=0, remote_hit_tokens=0, computed_tokens=0
    )
    tally.took(replace(served(asked, ANSWER), accounting=nowhere), ANSWER)
    assert len(tally.unclear) == 1


def test_another_output_is_remembered_with_the_one_that_was_expected() -> None:
    (difference,) = tally_of(ANSWER, (9, *ANSWER[1:])).differences
    assert (difference.prompt, difference.output) == (PROMPT, (9, *ANSWER[1:]))
    assert difference.expected == ANSWER


# -- the verdict ----------------------------------------------------------------------------------


def result(tally: Tally, **changes: Any) -> ChaosResult:
    values: dict[str, Any] = {
        "plan": PLAN,
        "tally": tally,
        "struck": (struck(1.0),),
        "start": AT_REST,
    }
    return ChaosResult(**(values | {"end": AT_REST} | changes))


def struck(recovery_s: float | None) -> Struck:
    return Struck(fault=make_fault("kill_node"), victim="node-1", recovery_s=recovery_s)


def test_a_run_is_good_when_everything_came_back_and_nothing_was_wrong() -> None:
    good = result(Tally(served=5), struck=(struck(1.0), struck(4.0), struck(2.5)))
    shown = json.loads(json.dumps(to_json(good)))
    assert shown["ok"]
    assert shown["faults"]["kill_node"] == {
        "count": 3,
        "victims": {"node-1": 3},
        "recovery_s": {"min": 1.0, "median": 2.5, "max": 4.0},
    }
    assert shown["faults"]["kill_raylet"] == {"count": 0, "victims": {}, "recovery_s": None}
    assert shown["repeat"] == "kvferry chaos --minutes 2 --seed 7"


def test_what_did_not_recover_or_come_back_is_a_problem() -> None:
    good = Tally(served=5)
    assert result(good).problems == ()
    assert result(good, struck=(struck(None),)).problems == ("kill_node: node-1: not recovered",)
    assert result(good, end=None).problems == ("the coordinator did not answer any more",)
    assert result(good, end=replace(AT_REST, leases=1)).problems == ("leases were 0 and are 1",)


def test_a_run_that_shows_nothing_is_no_good_run() -> None:
    good = Tally(served=5)
    assert result(Tally()).problems == ("no request was served",)
    assert result(good, struck=()).problems == ("no fault came",)
    leaking = replace(AT_REST, leases=1)
    assert result(good, start=leaking, end=leaking).problems == (
        "before the first fault, something was held for somebody",
    )
    unread = replace(AT_REST, memory_bytes={"asker": 1000, "RankActor": 0})
    assert result(good, start=unread, end=unread).problems == (
        "nothing is known of what RayCoordinatorActor used",
        "nothing is known of what RankActor used",
    )


def test_an_output_is_wrong_where_no_near_tie_explains_it() -> None:
    tally = tally_of(ANSWER, (9, *ANSWER[1:]))
    shown = to_json(result(tally))["requests"]
    assert (shown["near_ties"], shown["wrong"]) == (1, 0)
    wrong = result(tally, wrong=tuple(tally.differences))
    assert (len(wrong.problems), to_json(wrong)["requests"]["wrong"]) == (1, 1)


@pytest.mark.parametrize(
    "words", [("--minutes", "0"), ("--minutes", "nan"), ("--seed", "-1"), ("--only", "kill_me")]
)
def test_bad_options_end_with_2_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["chaos", "--json", *words])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "BadInputError"


def test_the_command_that_repeats_a_run_names_the_chosen_faults() -> None:
    plan = replace(PLAN, model="here", kinds=("kill_node", "pause_node"))
    assert plan.command == (
        "kvferry chaos --minutes 2 --seed 7 --model here --only kill_node --only pause_node"
    )
