"""Known failures of handing blocks over, each as a script of the simulator; the number names it.

B31 and B32 are of loads that are aborted, B34 of such as fail in part, B37 of what was promised and
is gone, B39 of messages of requests that are gone.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.sim.scripted import (
    SOON_S,
    Scenario,
    answer,
    at_frame,
    hashes_of,
    prompt,
    scenario,
)
from tests.sim.scripted_life import Life

from kvferry.proto.ids import FIRST_GROUP, InstanceId, RequestId, pack_group
from kvferry.proto.layout import grid
from kvferry.proto.step_messages import LoadResult

TWO_SHARDS = grid(block_tokens=2, dcp=2)


@pytest.fixture
def service() -> Iterator[Scenario]:
    with scenario() as running:
        yield running


# -- B31 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_deaf", [True, False], ids=["open writer", "closed writer"])
def test_b31_blocks_of_an_aborted_load_have_no_next_owner_while_its_writer_is_open(
    service: Scenario, is_deaf: bool
) -> None:
    """Three blocks; two are promised to "a", whose sender freezes for 5 s after the first frame."""
    sender, taker = service.add("p", "prefill"), service.add("d", num_blocks=4)
    first, second = prompt(1, 9), prompt(2, 8)
    service.compute(sender, "seed", first)
    taker.fetch.is_deaf = is_deaf
    begun_s = service.world.now_s
    taker.fetch.at_frame = at_frame(1, lambda: service.pause(sender, 5.0))
    service.submit(taker, "a", first)
    service.until(lambda: taker.fetch.num_frames == 1)
    assert service.num_free(taker) == 1
    service.run_for(1.0)
    taker.engine.abort(RequestId("a"))
    service.submit(taker, "b", second)
    service.run_for(1.0)
    if is_deaf:
        assert service.num_free(taker) == 1
        assert taker.finished == {}
        assert service.result(taker, "b", within_s=5.0)[0] == answer(second)
        assert service.world.now_s - begun_s > 5.0
    else:
        assert service.result(taker, "b", within_s=0.0)[0] == answer(second)
    assert service.result(taker, "a")[1].reason == "aborted"
    service.run_for(10.0)  # the sender has sent what it had
    service.submit(taker, "again", second)
    assert service.result(taker, "again")[0] == answer(second)
    service.require_nothing_held()


# -- B32 -------------------------------------------------------------------------------------------

THREE = {name: prompt(seed, 9) for seed, name in enumerate("abc", start=3)}


def abort_three_loads(service: Scenario, sender: Life, taker: Life, *, frozen_s: float) -> None:
    """All six blocks are promised to requests that are aborted while the sender is frozen."""
    for name, tokens in THREE.items():
        service.compute(sender, f"seed {name}", tokens)
    taker.fetch.is_deaf = True
    service.pause(sender, frozen_s)
    for name, tokens in THREE.items():
        service.submit(taker, name, tokens)
    service.until(lambda: service.num_free(taker) == 0)
    for name in THREE:
        taker.engine.abort(RequestId(name))
    service.submit(taker, "fourth", prompt(2, 24))
    service.run_for(1.0)
    assert service.num_free(taker) == 0


def require_all_served(service: Scenario, taker: Life, within_s: float) -> None:
    fourth = prompt(2, 24)
    assert service.result(taker, "fourth", within_s)[0] == answer(fourth)
    assert {service.result(taker, name)[1].reason for name in THREE} == {"aborted"}
    service.until(lambda: service.num_free(taker) == 6)


def test_b32a_blocks_of_aborted_loads_come_back_when_the_sender_is_dead(service: Scenario) -> None:
    sender, taker = service.add("p", "prefill"), service.add("d", num_blocks=7)
    abort_three_loads(service, sender, taker, frozen_s=60.0)
    service.kill(sender)
    require_all_served(service, taker, SOON_S)
    # Its own member is forgotten when it was silent for too long, with its leases.
    service.require_nothing_held(within_s=11.0)


def test_b32b_blocks_of_aborted_loads_come_back_with_the_answer(service: Scenario) -> None:
    sender, taker = service.add("p", "prefill"), service.add("d", num_blocks=7)
    abort_three_loads(service, sender, taker, frozen_s=2.0)
    require_all_served(service, taker, 2.0)
    service.require_nothing_held(within_s=SOON_S)


def test_b32c_without_an_answer_they_come_back_with_the_lease_and_a_later_word_is_counted() -> None:
    with scenario(step_lease_s=3.0) as service:
        sender, taker = service.add("p", "prefill"), service.add("d", num_blocks=7)
        abort_three_loads(service, sender, taker, frozen_s=5.0)
        require_all_served(service, taker, 3.0)
        service.run_for(3.0)  # the sender sends what it was asked for
        num_ignored = service.counter("ignored_messages")
        step = taker.engine._next_step()
        late = LoadResult(request_id=RequestId("a"), num_computed_tokens=8)
        service.ask(replace(step, load_results=(late,)))
        assert service.counter("ignored_messages") == num_ignored + 1
        service.require_nothing_held()
        assert service.num_free(taker) == 6


# -- B34 -------------------------------------------------------------------------------------------


def load_of_two_parts(service: Scenario) -> tuple[Life, Life, tuple[int, ...]]:
    """The taker has one rank, the sender's tokens are dealt over two: a fetch from each."""
    sender = service.add("p", "prefill", layout=TWO_SHARDS)
    taker, tokens = service.add("d"), prompt(1, 13)
    service.compute(sender, "seed", tokens)
    return sender, taker, tokens


def require_computed(service: Scenario, taker: Life, tokens: tuple[int, ...]) -> None:
    """The load failed once, nothing of it counts, and all was computed."""
    output, finished = service.result(taker, "r", within_s=6.0)
    assert output == answer(tokens)
    parts = finished.accounting
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (0, len(tokens))
    assert service.counter("failed_loads") == 1


def test_b34a_a_part_that_breaks_off_ends_the_load_at_once_and_nothing_of_it_counts(
    service: Scenario,
) -> None:
    sender, taker, tokens = load_of_two_parts(service)

    def kill_second_rank(_: int) -> None:
        if taker.fetch.num_fetches == 2:
            service.kill(sender, rank=1)

    taker.fetch.at_frame = kill_second_rank
    service.submit(taker, "r", tokens)
    require_computed(service, taker, tokens)
    assert not sender.member.parts[1].process.is_alive


def test_b34b_a_part_that_cannot_begin_ends_the_load_at_once(service: Scenario) -> None:
    sender, taker, tokens = load_of_two_parts(service)
    service.kill(sender, rank=1)
    service.submit(taker, "r", tokens)
    begun_s = service.world.now_s
    require_computed(service, taker, tokens)
    assert service.world.now_s - begun_s < SOON_S


def test_b34c_a_part_that_never_ends_fails_at_the_deadline() -> None:
    with scenario(step_lease_s=3.0) as service:
        sender, taker, tokens = load_of_two_parts(service)
        service.pause(sender, 60.0, rank=1)
        begun_s = service.world.now_s
        service.submit(taker, "r", tokens)
        require_computed(service, taker, tokens)
        assert 3.0 <= service.world.now_s - begun_s < 4.0


def test_b34d_what_came_in_time_counts_though_it_is_looked_at_after_the_deadline() -> None:
    """The taker freezes when the last frame but one is in place, until after the deadline."""
    with scenario(step_lease_s=3.0) as service:
        sender, taker = service.add("p", "prefill"), service.add("d")
        tokens = prompt(1, 9)
        service.compute(sender, "seed", tokens)
        taker.fetch.at_frame = at_frame(3, lambda: service.pause(taker, 4.0))
        service.submit(taker, "r", tokens)
        output, finished = service.result(taker, "r", within_s=6.0)
        assert output == answer(tokens)
        assert taker.fetch.num_frames == 4
        assert finished.accounting.remote_hit_tokens == 8
        assert service.counter("failed_loads") == 0
        service.require_nothing_held()


# -- B37 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "lost", "num_delivered"),
    [(0, 2, 8), (0, 0, 0), (1, 2, 8)],
    ids=["the last block", "the first block", "the last block on one shard"],
)
def test_b37_what_was_promised_and_is_gone_is_computed_on_all_shards_and_not_promised_again(
    service: Scenario, rank: int, lost: int, num_delivered: int
) -> None:
    """The lease keeps the coordinator from giving a block away; here one of its workers lost it."""
    sender = service.add("p", "prefill", layout=TWO_SHARDS)
    taker = service.add("d", layout=TWO_SHARDS)
    tokens = prompt(1, 13)
    service.compute(sender, "seed", tokens)
    worker = sender.member.parts[rank].worker
    found = worker.residency.find(pack_group(hashes_of(tokens)[lost], FIRST_GROUP))
    assert found is not None
    # No step of the sender's process looks at what the coordinator thinks is there.
    service.lives.pop(InstanceId("p"))
    worker.reused([found.block_id])
    service.submit(taker, "r", tokens)
    output, finished = service.result(taker, "r")
    assert output == answer(tokens)
    parts = finished.accounting
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (num_delivered, 13 - num_delivered)
    assert service.counter("failed_loads") == 1
    num_fetches = taker.fetch.num_fetches
    service.submit(taker, "again", tokens)
    assert service.result(taker, "again")[1].accounting.local_hit_tokens == 12
    third = service.add("third", layout=TWO_SHARDS)
    service.kill(taker)
    service.run_for(11.0)
    service.submit(third, "r3", tokens)
    assert service.result(third, "r3")[1].accounting.remote_hit_tokens == num_delivered
    assert taker.fetch.num_fetches == num_fetches
    assert service.counter("failed_loads") == 1


# -- B39 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("receive_s", "send_s", "num_free"),
    [(1.0, 3.0, 37), (3.0, 1.0, 35)],
    ids=["receive, then send", "send, then receive"],
)
def test_b39_blocks_of_a_request_that_is_gone_come_back_once_after_the_second_of_its_transfers(
    service: Scenario, receive_s: float, send_s: float, num_free: int
) -> None:
    """Of the four blocks of "r", two are pulled by "d" and two still come from "z" on its abort."""
    z, p, d = service.add("z"), service.add("p", "prefill"), service.add("d")
    tokens = prompt(1, 25)
    service.compute(z, "seed z", tokens[:17])
    service.compute(p, "seed p", tokens[:9])
    p.fetch.is_deaf = True
    d.fetch.at_frame = at_frame(1, lambda: service.pause(d, send_s))
    service.submit(d, "s", tokens[:9])
    service.until(lambda: d.fetch.num_frames == 1)
    p.fetch.at_frame = at_frame(1 + p.fetch.num_frames, lambda: service.pause(z, receive_s))
    num_frames = p.fetch.num_frames
    service.submit(p, "r", tokens, prefill_only=True)
    service.until(lambda: p.fetch.num_frames > num_frames)
    p.engine.abort(RequestId("r"))
    service.run_for(0.5)
    assert service.num_free(p) == 35
    service.run_for(1.5)
    assert service.num_free(p) == num_free
    assert service.result(d, "s", within_s=2.0)[0] == answer(tokens[:9])
    assert service.result(p, "r", within_s=2.0)[1].reason == "aborted"
    service.require_nothing_held()
    assert service.num_free(p) == 39

    num_ignored = service.counter("ignored_messages")
    late = [LoadResult(request_id=RequestId(name), num_computed_tokens=8) for name in ("r", "x")]
    for results in (late, late[:1]):
        service.ask(replace(p.engine._next_step(), load_results=tuple(results)))
    assert service.counter("ignored_messages") == num_ignored + 3
    service.compute(p, "after", prompt(2, 9))
