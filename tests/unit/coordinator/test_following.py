"""Requests that follow a prefill: what is loaded ahead for them, and who comes first."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.coordinator.fleet import (
    HYBRID,
    Fleet,
    admit,
    failed,
    load_blocks,
    loaded,
    num_granted,
    release,
    runs,
    wrote,
)

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import RequestId
from kvferry.proto.messages import Tick
from kvferry.proto.step_messages import Load, StepReply

TEXT = "xyzw"
NUM_TOKENS = 17
R = RequestId("r")
OVER = StepReply(prefill_over=(R,))
CANCEL = StepReply(cancel_loads=(R,))


def two_sides(decode_blocks: int = 40, **settings: Any) -> Fleet:
    """r has an open handoff from p to d, and runs at p in chunks of two blocks."""
    fleet = Fleet(**settings)
    fleet.register("p", num_blocks=80)
    fleet.register("d", num_blocks=decode_blocks)
    start_prefill(fleet, "r", TEXT)
    return fleet


def start_prefill(fleet: Fleet, request: str, text: str) -> None:
    fleet.open_handoff(request, "p", "d")
    fleet.step("p", 8, waiting=(admit(request, text),))


def prefill_wrote(fleet: Fleet, num_tokens: int) -> None:
    fleet.step(
        "p", progress=(wrote("r", num_tokens, NUM_TOKENS),), running=(runs("r", NUM_TOKENS),)
    )


def follow(fleet: Fleet, *texts: str, **parts: Any) -> StepReply:
    """Let r (r1, r2, ... if there are several) follow at d."""
    names = ["r"] if len(texts) < 2 else [f"r{i}" for i in range(len(texts))]
    follows = tuple(admit(name, text) for name, text in zip(names, texts, strict=True))
    return fleet.step("d", follows=follows, **parts)


def only(loads: tuple[Load, ...]) -> Load:
    (load,) = loads
    assert load.ahead
    return load


def test_each_chunk_is_loaded_once_it_is_written_and_the_request_holds_nothing_between() -> None:
    fleet = two_sides()
    assert follow(fleet, TEXT) == StepReply()
    prefill_wrote(fleet, 8)
    first = only(fleet.step("d").loads)
    assert (first.source.instance_id, first.num_hit_blocks) == ("p", 0)
    assert len(load_blocks(first)) == 2
    assert fleet.step("d") == StepReply()
    prefill_wrote(fleet, 16)
    second = only(fleet.step("d", load_results=(loaded("r", 8),)).loads)
    assert (second.num_hit_blocks, len(load_blocks(second))) == (2, 4)
    assert load_blocks(second)[:2] == load_blocks(first)
    fleet.step("d", load_results=(loaded("r", 16),))
    assert fleet.num_free("d") == 39
    assert fleet.locate(TEXT) == {"p": 4, "d": 4}
    assert fleet.step("d") == StepReply()
    assert fleet.describe().counters["loads_ahead"] == 2


def test_admission_finds_what_came_ahead_and_counts_it_as_remote() -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    fleet.step("d")
    fleet.step("d", load_results=(loaded("r", 8),))
    prefill_wrote(fleet, 16)
    fleet.step("p", releases=(release("r", handoff=True),))
    reply = fleet.step("d")
    assert reply == OVER
    (load,) = fleet.step("d", waiting=(admit("r", TEXT, ahead_tokens=8),)).loads
    assert (load.ahead, load.num_hit_blocks, len(load_blocks(load))) == (False, 2, 4)
    reply = fleet.step("d", load_results=(loaded("r", 16),), running=(runs("r", 17),))
    assert [num_granted(s) for s in reply.scheduled] == [1]
    counted = fleet.stats("d").first
    assert (counted.requests, counted.requested) == (1, 17)
    assert (counted.local_hit, counted.remote_hit, counted.computed) == (0, 16, 0)
    assert fleet.describe().counters["handoffs_done"] == 1
    assert fleet.describe().num_leases == 0


def test_groups_with_windows_are_loaded_ahead_as_their_rules_need() -> None:
    fleet = two_sides(identity=HYBRID, decode_blocks=80)
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    first = only(fleet.step("d").loads)
    assert [table.count(0) for table in first.block_ids] == [0, 0, 2, 1]
    prefill_wrote(fleet, 16)
    second = only(fleet.step("d", load_results=(loaded("r", 8),)).loads)
    assert second.num_hit_blocks == 2
    assert [table.count(0) for table in second.block_ids] == [0, 2, 4, 3]
    fleet.step("d", load_results=(loaded("r", 16),))
    assert fleet.locate(TEXT)["d"] == 4


def prefill_is_aborted(fleet: Fleet) -> None:
    fleet.step("p", releases=(release("r"),))


def prefill_dies(fleet: Fleet) -> None:
    fleet.remove("p")


def deadline_passes(fleet: Fleet) -> None:
    fleet.now = 31.0
    fleet.send(Tick())


def router_closes(fleet: Fleet) -> None:
    fleet.close_handoff("r")


def router_sends_it_elsewhere(fleet: Fleet) -> None:
    fleet.register("other")
    fleet.open_handoff("r", "p", "other")


@pytest.mark.parametrize(
    "ends",
    [prefill_is_aborted, prefill_dies, deadline_passes, router_closes, router_sends_it_elsewhere],
)
def test_however_a_prefill_ends_the_rest_is_computed(ends: Callable[[Fleet], None]) -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    fleet.step("d")
    fleet.step("d", load_results=(loaded("r", 8),))
    ends(fleet)
    assert fleet.step("d") == OVER
    asks = (admit("r", TEXT, ahead_tokens=8),)
    (scheduled,) = fleet.step("d", waiting=asks).scheduled
    assert (scheduled.num_computed_tokens, num_granted(scheduled)) == (8, 9)
    counted = fleet.stats("d").first
    assert (counted.local_hit, counted.remote_hit) == (0, 8)


def test_b36_a_preempted_prefill_is_not_over_and_gets_its_chunk_back_from_who_follows_it() -> None:
    fleet = Fleet()
    fleet.register("p", num_blocks=6)
    fleet.register("d", num_blocks=40)
    fleet.admit("p", admit("other", "", extra_tokens=1))
    start_prefill(fleet, "r", TEXT)
    follow(fleet, TEXT)
    asks = (runs("other", 1), runs("r", NUM_TOKENS))
    fleet.step("p", 0, progress=(wrote("r", 8, NUM_TOKENS),), running=asks)
    only(fleet.step("d").loads)
    fleet.step("d", load_results=(loaded("r", 8),))
    grown = wrote("other", 1, 13, admit("other", "abc").hashes)
    asks = (runs("other", 13), runs("r", NUM_TOKENS))
    assert fleet.step("p", progress=(grown,), running=asks).preempted == (R,)
    assert fleet.step("d") == StepReply()
    resumed = (admit("r", TEXT, resumed=True),)
    (back,) = fleet.step("p", releases=(release("other"),), waiting=resumed).loads
    assert (back.source.instance_id, len(load_blocks(back))) == ("d", 2)
    fleet.step("p", load_results=(loaded("r", 8),), running=(runs("r", NUM_TOKENS),))
    prefill_wrote(fleet, 16)
    assert only(fleet.step("d").loads).num_hit_blocks == 2


def test_a_prefill_that_is_over_waits_for_the_load_ahead_to_end() -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    fleet.step("d")
    fleet.remove("p")
    assert fleet.step("d") == StepReply()
    reply = fleet.step("d", load_results=(loaded("r", 4, failed(1)),))
    assert reply == OVER
    assert fleet.locate(TEXT) == {"d": 1}


def test_who_follows_no_open_handoff_is_told_at_once() -> None:
    fleet = two_sides()
    fleet.close_handoff("r")
    assert follow(fleet, TEXT) == OVER


def test_what_peers_have_already_is_loaded_before_the_prefill_has_begun() -> None:
    fleet = two_sides()
    fleet.register("other")
    fleet.cache("other", "xy")
    load = only(follow(fleet, TEXT).loads)
    assert (load.source.instance_id, len(load_blocks(load))) == ("other", 2)


def test_after_a_failed_load_ahead_nothing_more_is_loaded_until_the_prefill_is_over() -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    fleet.step("d")
    reply = fleet.step("d", load_results=(loaded("r", 4, failed(1)),))
    assert reply == StepReply()
    assert fleet.locate(TEXT)["d"] == 1
    prefill_wrote(fleet, 16)
    assert fleet.step("d") == StepReply()
    fleet.step("p", releases=(release("r", handoff=True),))
    assert fleet.step("d") == OVER
    (load,) = fleet.step("d", waiting=(admit("r", TEXT),)).loads
    assert load.num_hit_blocks == 1


def test_at_most_two_loads_are_ahead_at_once() -> None:
    fleet = Fleet()
    fleet.register("p", num_blocks=80)
    fleet.register("d", num_blocks=80)
    texts = [first + "xyz" for first in "abc"]
    for number, text in enumerate(texts):
        fleet.open_handoff(f"r{number}", "p", "d")
        fleet.cache("p", text, request=f"seed{number}")
    reply = follow(fleet, *texts)
    assert [(load.request_id, load.ahead) for load in reply.loads] == [("r0", True), ("r1", True)]
    reply = fleet.step("d", load_results=(loaded("r0", 16),))
    assert [load.request_id for load in reply.loads] == ["r2"]


def test_two_that_follow_with_one_prefix_get_one_load() -> None:
    fleet = Fleet()
    fleet.register("p", num_blocks=80)
    fleet.register("d", num_blocks=80)
    fleet.cache("p", TEXT)
    for name in ("r0", "r1"):
        fleet.open_handoff(name, "p", "d")
    assert [load.request_id for load in follow(fleet, TEXT, TEXT).loads] == ["r0"]
    assert fleet.step("d", load_results=(loaded("r0", 16),)) == StepReply()
    assert fleet.locate(TEXT)["d"] == 4


def test_what_the_pool_took_back_is_not_loaded_again_before_there_is_more() -> None:
    fleet = two_sides(decode_blocks=10)
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    fleet.step("d")
    fleet.step("d", load_results=(loaded("r", 8),))
    fleet.compute("d", admit("large", "abcdefgh", allow_remote=False))
    assert fleet.locate(TEXT)["d"] == 0
    assert fleet.step("d", releases=(release("large"),)) == StepReply()
    prefill_wrote(fleet, 16)
    assert only(fleet.step("d").loads).num_hit_blocks == 0


def test_one_block_in_eight_is_left_free_by_loads_ahead() -> None:
    fleet = two_sides(decode_blocks=25)
    # 24 usable blocks, of which 3 are to stay free.
    fleet.admit("d", admit("a", "", extra_tokens=3))
    fleet.step("d", waiting=(admit("b", "abcdefghijklmnopqr", extra_tokens=1),))
    assert fleet.num_free("d") == 4
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    assert fleet.step("d") == StepReply()
    fleet.step("d", releases=(release("a"),))
    assert fleet.num_free("d") == 3  # of five, two are written by a load now


def test_a_running_request_takes_the_blocks_of_a_load_ahead_before_those_of_another_load() -> None:
    fleet = two_sides(decode_blocks=10)
    fleet.register("other")
    fleet.cache("other", "ab")
    fleet.admit("d", admit("a", "q", extra_tokens=0))
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    only(fleet.step("d").loads)
    fleet.admit_load("d", admit("new", "ab"))
    fleet.step("d", progress=(wrote("a", 4, 4),), running=(runs("a", 4),), ahead_tokens=0)
    # 9 usable blocks: 1 of a, 2 of each load, so that 4 are free and a wants 5 more.
    grown = admit("a", "qrstuv", extra_tokens=0)
    report = wrote("a", 4, 24, grown.hashes[1:])
    reply = fleet.step("d", progress=(report,), running=(runs("a", 24),))
    assert reply == CANCEL
    # Its writer is closed: what came is findable, but free, and so it is taken.
    reply = fleet.step("d", load_results=(loaded("r", 0, failed(0)),), running=(runs("a", 24),))
    assert [num_granted(s) for s in reply.scheduled] == [20]
    assert reply.preempted == ()


def test_a_waiting_request_that_lacks_blocks_comes_before_loads_ahead() -> None:
    fleet = two_sides(decode_blocks=10)
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    only(fleet.step("d").loads)
    waits = admit("w", "abcdefg", extra_tokens=1)
    assert fleet.step("d", waiting=(waits,)) == CANCEL
    prefill_wrote(fleet, 16)
    reply = fleet.step("d", load_results=(loaded("r", 0, failed(0)),), waiting=(waits,))
    assert [s.request_id for s in reply.scheduled] == ["w"]


def test_releasing_a_follower_ends_its_handoff_and_the_prefill_leases_nothing() -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    assert fleet.step("d", releases=(release("r"),)) == StepReply()
    prefill_wrote(fleet, 8)
    fleet.step("p", releases=(release("r", handoff=True),))
    description = fleet.describe()
    assert (description.num_handoffs, description.num_leases) == (0, 0)
    assert description.counters["handoffs_without_taker"] == 1
    assert description.counters["ignored_messages"] == 0
    assert (fleet.num_free("p"), fleet.num_free("d")) == (79, 39)


def test_the_blocks_of_a_released_follower_come_back_when_its_writer_is_closed() -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    prefill_wrote(fleet, 8)
    fleet.step("d")
    assert fleet.step("d", releases=(release("r"),)).cancel_loads == ("r",)
    assert fleet.num_free("d") == 37
    assert fleet.step("d", load_results=(loaded("r", 4, failed(1)),)) == StepReply()
    assert fleet.num_free("d") == 39
    assert fleet.describe().num_leases == 0


def test_a_request_that_follows_can_neither_follow_again_nor_ask_for_admission() -> None:
    fleet = two_sides()
    follow(fleet, TEXT)
    again = (admit("r", TEXT),)
    with pytest.raises(BadInputError, match="follows a prefill already"):
        fleet.step("d", follows=again)
    with pytest.raises(BadInputError, match="follows a prefill already"):
        fleet.step("d", waiting=again)


def test_a_request_can_not_follow_and_wait_in_one_step() -> None:
    fleet = two_sides()
    with pytest.raises(BadInputError, match="twice in waiting and follows"):
        fleet.step("d", follows=(admit("r", TEXT),), waiting=(admit("r", TEXT),))


@pytest.mark.parametrize("ahead_tokens", [-1, 18])
def test_no_more_than_its_tokens_can_have_come_ahead(ahead_tokens: int) -> None:
    fleet = two_sides()
    with pytest.raises(BadInputError, match="ahead_tokens"):
        fleet.step("d", waiting=(admit("r", TEXT, ahead_tokens=ahead_tokens),))
