"""Known failures of services of which a part dies, each as a script of the simulator.

The number names the case. B36 is of prefills that refuse or end early, B38 of sides that outlive
each other, B41 of peers that come back, B42 of the coordinator's restart, B44 of members that die
often, B45 of a new member beside full ones.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.sim.scripted import (
    Scenario,
    answer,
    at_frame,
    hashes_of,
    prompt,
    scenario,
)
from tests.sim.scripted_life import Life

from kvferry.cluster.serving.router import Router, Served
from kvferry.cluster.serving.routing import Route
from kvferry.cluster.serving.sequence import Run
from kvferry.cluster.sim.members import identity_of
from kvferry.proto.errors import MismatchError, PromptTooLongError
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.messages import (
    Locate,
    Located,
    OpenHandoff,
    Registered,
    RegisterInstance,
    expect,
)

FROM_P_TO_D = Route(prefill=InstanceId("p"), decode=InstanceId("d"))
HANDOFF_TTL_S = 4.0


@pytest.fixture
def service() -> Iterator[Scenario]:
    with scenario() as running:
        yield running


def open_handoff(service: Scenario, name: str) -> None:
    service.ask(
        OpenHandoff(
            call_id=f"open/{name}",
            request_id=RequestId(name),
            prefill_instance=InstanceId("p"),
            decode_instance=InstanceId("d"),
            ttl_s=HANDOFF_TTL_S,
        )
    )


def located(service: Scenario, tokens: tuple[int, ...]) -> dict[InstanceId, int]:
    """How many hashes of a prompt each instance holds, as far as the coordinator knows."""
    ask = Locate(identity_digest=identity_of("inside", 1).digest(), hashes=hashes_of(tokens))
    holders = expect(service.ask(ask), Located).holders
    return {holder.source.instance_id: holder.num_hashes for holder in holders}


# -- B36 -------------------------------------------------------------------------------------------


def test_b36_a_prompt_that_the_prefill_side_refuses_is_an_error_that_names_it(
    service: Scenario,
) -> None:
    service.add("p", "prefill", max_model_len=64)
    service.add("d", max_model_len=128)
    tokens: list[int] = []
    asked = service.request("r", prompt(1, 70))

    async def stream(router: Router) -> None:
        async for event in router.stream(asked, route=FROM_P_TO_D):
            assert isinstance(event, int)
            tokens.append(event)

    with pytest.raises(PromptTooLongError, match=r"instance p: .*max_model_len=64"):
        service.routed(stream)
    assert tokens == []
    service.require_nothing_held()


def test_b36_what_an_aborted_prefill_left_out_is_computed_and_never_read(
    service: Scenario,
) -> None:
    p = service.add("p", "prefill", token_budget=8)
    service.add("d")

    def abort_at_half(run: Run) -> None:
        if run.start_position == 32:
            p.engine.abort(run.request.request_id)

    p.before_run(abort_at_half)
    asked = service.request("r", prompt(1, 64))
    served = service.routed(lambda router: router.serve(asked, route=FROM_P_TO_D))
    assert served.output_token_ids == answer(prompt(1, 64))
    parts = served.accounting
    assert served.prefill_computed_tokens == 40
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (40, 24)
    service.require_nothing_held()


def test_b36_a_prefill_preempted_in_its_last_step_is_done_again_before_it_is_reported(
    service: Scenario,
) -> None:
    """Ten blocks: five stay leased for the taker of "a", so the last step of "b" has no room."""
    p = service.add("p", "prefill", num_blocks=11, token_budget=24)
    d = service.add("d")
    prompts = {"a": prompt(1, 21), "b": prompt(2, 29)}
    for name in prompts:
        open_handoff(service, name)
    for name, tokens in prompts.items():
        service.submit(p, name, tokens, prefill_only=True)
    assert service.result(p, "a")[1].reason == "prefilled"
    service.run_for(1.0)
    assert "b" not in p.finished
    assert service.counter("preemptions") == 1
    service.submit(d, "a", prompts["a"])
    assert service.result(d, "a")[0] == answer(prompts["a"])
    ended = service.result(p, "b")[1]
    assert (ended.reason, ended.preemptions) == ("prefilled", 1)
    service.submit(d, "b", prompts["b"])
    output, finished = service.result(d, "b")
    assert output == answer(prompts["b"])
    assert finished.accounting.remote_hit_tokens == 28
    service.require_nothing_held()


# -- B38 -------------------------------------------------------------------------------------------


def test_b38a_three_samples_of_one_prompt_are_handed_over_and_released(service: Scenario) -> None:
    service.add("p", "prefill")
    service.add("d")
    asked = [service.request(f"r/{number}", prompt(1, 13), 3) for number in range(3)]

    async def serve(router: Router) -> list[Served]:
        return await asyncio.gather(*(router.serve(one, route=FROM_P_TO_D) for one in asked))

    for served in service.routed(serve):
        assert served.output_token_ids == answer(prompt(1, 13), 3)
        assert served.accounting.computed_tokens == 1
    service.require_nothing_held()
    assert service.counter("handoffs_done") == 3


def test_b38b_blocks_for_a_decode_side_that_was_killed_are_free_after_the_handoffs_time(
    service: Scenario,
) -> None:
    p, d = service.add("p", "prefill", num_blocks=9), service.add("d")
    opened_s = service.world.now_s
    open_handoff(service, "r")
    service.submit(p, "r", prompt(1, 21), prefill_only=True)
    assert service.result(p, "r")[1].reason == "prefilled"
    service.kill(d)
    service.run_for(0.5)
    assert service.num_free(p) == 3
    service.submit(p, "next", prompt(2, 32), prefill_only=True)
    assert service.result(p, "next", within_s=HANDOFF_TTL_S)[1].reason == "prefilled"
    assert service.world.now_s - opened_s >= HANDOFF_TTL_S
    assert service.counter("handoffs_expired") == 1
    service.require_nothing_held()
    assert service.num_free(p) == 8


def test_b38c_of_a_prefill_side_that_was_killed_nobody_keeps_anything_and_a_new_one_serves(
    service: Scenario,
) -> None:
    first = service.add("p", "prefill")
    takers = [service.add("d0"), service.add("d1")]
    old, new = prompt(1, 13), prompt(2, 13)
    service.compute(first, "seed", old)
    for taker in takers:
        taker.fetch.at_frame = at_frame(1, lambda: service.pause(first, 60.0))
        service.submit(taker, "r", old)
    service.until(lambda: any(taker.fetch.num_frames for taker in takers))
    service.kill(first)
    for taker in takers:
        assert service.result(taker, "r")[0] == answer(old)
    second = service.add("p", "prefill", incarnation=2)
    assert located(service, old)[InstanceId("p")] == 0
    service.compute(second, "seed", new)
    for taker in takers:
        service.submit(taker, "s", new)
        output, finished = service.result(taker, "s")
        assert output == answer(new)
        assert finished.accounting.remote_hit_tokens == 12
    service.require_nothing_held()


# -- B41 -------------------------------------------------------------------------------------------


def test_b41_a_peer_that_came_back_at_the_same_address_is_not_read_as_its_earlier_life(
    service: Scenario,
) -> None:
    first, d = service.add("w", "prefill"), service.add("d")
    old, new = prompt(1, 13), prompt(2, 13)
    service.compute(first, "seed", old)
    # The taker was told to pull from the first life, and comes to the address of the second.
    service.pause(d, 0.4)
    service.submit(d, "r", old)
    service.kill(first)
    second = service.add("w", "prefill", incarnation=2)
    assert second.member.info.rank_addresses == first.member.info.rank_addresses
    output, finished = service.result(d, "r")
    assert output == answer(old)
    assert finished.accounting.remote_hit_tokens == 0
    assert service.counter("failed_loads") <= 1
    service.compute(second, "seed", new)
    service.submit(d, "s", new)
    output, finished = service.result(d, "s")
    assert output == answer(new)
    assert finished.accounting.remote_hit_tokens == 12
    service.require_nothing_held()


def test_b41_a_fetch_for_the_earlier_life_is_refused_by_the_later_one(service: Scenario) -> None:
    """The load is under way to the first life when the second begins at its address."""
    first, d = service.add("w", "prefill"), service.add("d")
    tokens = prompt(1, 13)
    service.compute(first, "seed", tokens)
    ended: list[Life] = []

    def replace_it() -> None:
        service.kill(first)
        ended.append(first)

    d.fetch.before_fetch = replace_it
    service.submit(d, "r", tokens)
    service.until(lambda: bool(ended))
    service.add("w", "prefill", incarnation=2)
    output, finished = service.result(d, "r")
    assert output == answer(tokens)
    assert (finished.accounting.remote_hit_tokens, d.fetch.num_fetches) == (0, 1)
    assert service.counter("failed_loads") == 1
    service.require_nothing_held()


def test_b41_each_request_tries_a_peer_that_fails_every_fetch_once_at_most(
    service: Scenario,
) -> None:
    w, d = service.add("w", "prefill"), service.add("d")
    prompts = [prompt(seed, 13) for seed in range(1, 5)]
    for number, tokens in enumerate(prompts):
        service.compute(w, f"seed/{number}", tokens)
    service.network.cut.add(("d/0", "w/0"))
    service.served.pop("w/0")
    for number, tokens in enumerate(prompts, start=1):
        service.submit(d, f"r/{number}", tokens)
        output, finished = service.result(d, f"r/{number}")
        assert output == answer(tokens)
        assert finished.accounting.computed_tokens == 13
        assert (d.fetch.num_fetches, service.counter("failed_loads")) == (number, number)
    service.require_nothing_held()


# -- B42 -------------------------------------------------------------------------------------------


def test_b42_a_coordinator_that_restarts_gives_nothing_away_that_somebody_still_has(
    service: Scenario,
) -> None:
    """ "r0" writes into two of seven blocks, later three; "r1" asks for six, and "w2" joins."""
    w0, w1 = service.add("w0", num_blocks=8, token_budget=8), service.add("w1")
    idle = prompt(5, 5)
    service.compute(w1, "seed", idle)
    assert located(service, idle)[InstanceId("w1")] == 1
    first = prompt(1, 5)
    service.submit(w0, "r0", first, 8)
    service.until(lambda: len(w0.tokens.get("r0", ())) >= 2)
    epoch = service.service.epoch
    service.coordinators.crash()
    second = prompt(2, 23)
    service.submit(w0, "r1", second)
    service.until(lambda: service.coordinators.num_restarts == 1, 4.0)
    w2 = service.add("w2")
    assert service.service.epoch == epoch + 1
    service.until(lambda: located(service, idle).get(InstanceId("w1")) == 1, 5.0)
    assert service.result(w0, "r0", within_s=10.0)[0] == answer(first, 8)
    assert service.result(w0, "r1", within_s=10.0)[0] == answer(second)
    service.submit(w2, "r2", idle)
    output, finished = service.result(w2, "r2")
    assert (output, finished.accounting.remote_hit_tokens) == (answer(idle), 4)
    service.require_nothing_held(within_s=5.0)


def test_b42_until_a_member_is_back_nobody_finds_its_blocks_and_it_gets_none(
    service: Scenario,
) -> None:
    w0, d = service.add("w0"), service.add("d")
    tokens = prompt(1, 13)
    service.compute(w0, "seed", tokens)
    service.pause(w0, 8.0)
    service.coordinators.crash()
    service.until(lambda: service.coordinators.num_restarts == 1, 4.0)
    service.until(lambda: service.is_member(d), 5.0)
    assert located(service, tokens).get(InstanceId("w0")) is None
    service.submit(d, "r", tokens)
    output, finished = service.result(d, "r", within_s=5.0)
    assert (output, finished.accounting.remote_hit_tokens) == (answer(tokens), 0)
    service.until(lambda: located(service, tokens).get(InstanceId("w0")) == 3, 10.0)
    service.require_nothing_held(within_s=5.0)


# -- B44 -------------------------------------------------------------------------------------------

NUM_LIVES = 100


def sizes(service: Scenario) -> dict[str, int]:
    """Everything that may grow with the lives of members."""
    state = service.service.state
    return {
        "instances": len(state.instances),
        "members of the index": len(state.index.members()),
        "keys": state.index.num_keys(),
        "leases": len(state.leases),
        "handoffs": len(state.handoffs),
    }


def test_b44_the_tables_after_many_lives_of_a_member_are_those_of_one(service: Scenario) -> None:
    tokens = prompt(1, 17)
    before: dict[str, int] = {}
    for number in range(1, 1 + NUM_LIVES):
        life = service.add("w", num_blocks=6, incarnation=number)
        service.compute(life, "seed", tokens)
        before = before or sizes(service)
        if number < NUM_LIVES:
            service.kill(life)
    assert before["keys"] == 4
    assert sizes(service) == before
    service.require_nothing_held()


def test_b44_an_identical_registration_is_taken_and_that_of_another_process_is_refused(
    service: Scenario,
) -> None:
    life = service.add("w")
    info = life.member.info
    again = service.ask(RegisterInstance(call_id="again", info=info))
    assert expect(again, Registered).epoch == service.service.epoch
    other = replace(info, rank_addresses=("elsewhere/0",), rank_pids=(2,))
    with pytest.raises(MismatchError) as refused:
        service.ask(RegisterInstance(call_id="other", info=other))
    assert "elsewhere/0" in str(refused.value)
    assert info.rank_addresses[0] in str(refused.value)
    service.compute(life, "after", prompt(1, 9))


# -- B45 -------------------------------------------------------------------------------------------


def test_b45_an_empty_member_beside_three_full_ones_draws_no_more_than_its_share(
    service: Scenario,
) -> None:
    """Forty requests of four tokens that nobody has, all at once: ten each."""
    for number in range(3):
        life = service.add(f"d{number}", num_blocks=20)
        service.compute(life, "seed", prompt(10 + number, 65))
    service.add("new", num_blocks=20)
    asked = [service.request(f"r/{number}", prompt(100 + number, 5)) for number in range(40)]

    async def serve(router: Router) -> list[Served]:
        return await asyncio.gather(*(router.serve(one) for one in asked))

    served = service.routed(serve)
    places = [one.decode_instance for one in served]
    assert {name: places.count(name) for name in set(places)} == dict.fromkeys(
        ["d0", "d1", "d2", "new"], 10
    )
    assert all(one.output_token_ids == answer(one.request.prompt_token_ids) for one in served)
    service.require_nothing_held()
