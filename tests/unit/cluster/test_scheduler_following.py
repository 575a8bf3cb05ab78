"""What an engine's queues do with a request whose prefill runs elsewhere."""

import pytest
from tests.unit.cluster.test_scheduler import Rig, request

from kvferry.cluster.serving.requests import EngineRequest
from kvferry.cluster.serving.scheduler import Scheduler
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.messages import CloseHandoff, OpenHandoff
from kvferry.proto.step_messages import LoadResult

PROMPT = range(40)
"""Two chunks of 16 tokens, and 8 more; its full blocks short of the last token are 9."""


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.add_instance("p", "prefill")
    rig.add_instance("d")
    return rig


def follower(name: str = "r") -> EngineRequest:
    return request(name, PROMPT, follows_prefill=True)


def start(rig: Rig) -> Scheduler:
    """Let r be computed at p, and follow that at d."""
    rig.service.handle(
        OpenHandoff(
            call_id="open",
            request_id=RequestId("r"),
            prefill_instance=InstanceId("p"),
            decode_instance=InstanceId("d"),
            ttl_s=10.0,
        ),
        0.0,
    )
    rig.schedulers["p"].add(request("r", PROMPT, prefill_only=True))
    rig.schedulers["d"].add(follower())
    rig.ask("d")
    return rig.schedulers["d"]


def prefill_a_chunk(rig: Rig) -> None:
    rig.compute("p")
    rig.ask("p")


def came(num_tokens: int) -> LoadResult:
    return LoadResult(request_id=RequestId("r"), num_computed_tokens=num_tokens)


def num_free(rig: Rig, name: str) -> int:
    return rig.service.state.instances[InstanceId(name)].manager.pool.num_free_blocks


def test_chunks_are_loaded_while_the_next_is_computed_and_the_rest_after_the_end(rig: Rig) -> None:
    decode = start(rig)
    rig.ask("p")
    prefill_a_chunk(rig)  # 16 tokens are written, the next 16 are granted
    (first,) = rig.ask("d").loads
    assert (first.hit_tokens, len(first.loads[0].block_ids)) == (0, 4)
    prefill_a_chunk(rig)
    decode.load_ended(came(16), pulled_bytes=100)
    assert decode.must_ask()
    (second,) = rig.ask("d").loads
    assert (second.hit_tokens, second.loads[0].first_block) == (16, 4)
    assert len(second.loads[0].block_ids) == 4
    decode.load_ended(came(32), pulled_bytes=100)
    rig.run_until_idle("p")
    assert rig.finished("r").reason == "prefilled"
    rig.outputs.clear()
    rig.ask("d")
    assert not decode.follows_prefills()
    (last,) = rig.ask("d").loads
    assert (last.hit_tokens, len(last.loads[0].block_ids)) == (32, 1)
    decode.load_ended(came(36), pulled_bytes=50)
    rig.run_until_idle("d")
    finished = rig.finished("r")
    parts = finished.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 36, 4)
    assert (finished.ahead_tokens, finished.pulled_bytes) == (32, 250)
    assert num_free(rig, "d") == 19


def test_a_follower_takes_no_place_of_a_request_that_can_run(rig: Rig) -> None:
    decode = rig.add_instance("d", max_running=1)
    start(rig)
    rig.ask("p")
    prefill_a_chunk(rig)
    assert len(rig.ask("d").loads) == 1
    decode.add(request("other", range(100, 110), max_tokens=1))
    rig.run_until_idle("d")
    assert rig.finished("other").reason == "length"


def test_asking_again_is_the_only_reason_to_ask_while_a_follower_waits(rig: Rig) -> None:
    decode = start(rig)
    assert not decode.must_ask()
    assert decode.follows_prefills()


def test_what_a_broken_off_prefill_left_out_is_computed(rig: Rig) -> None:
    decode = start(rig)
    rig.ask("p")
    prefill_a_chunk(rig)
    rig.ask("d")
    rig.schedulers["p"].abort(RequestId("r"))
    rig.ask("p")
    decode.load_ended(came(16), pulled_bytes=100)
    rig.ask("d")
    rig.outputs.clear()
    rig.run_until_idle("d")
    parts = rig.finished("r").accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens, parts.computed_tokens) == (0, 16, 24)
    assert num_free(rig, "p") == 19


def test_a_preempted_request_finds_its_own_blocks_and_none_is_counted_twice() -> None:
    rig = Rig()
    rig.add_instance("p", "prefill")
    rig.add_instance("d", num_blocks=13, policy="priority")
    decode = start(rig)
    rig.ask("p")
    prefill_a_chunk(rig)
    rig.ask("d")
    decode.load_ended(came(16), pulled_bytes=100)
    rig.service.handle(CloseHandoff(call_id="close", request_id=RequestId("r")), 0.0)
    rig.ask("d")
    rig.schedulers["p"].abort(RequestId("r"))
    rig.run_until_idle("p")
    rig.outputs.clear()
    decode.add(request("first", range(100, 104), max_tokens=20, priority=-1))
    rig.run_until_idle("d")
    finished = rig.finished("r")
    assert finished.preemptions == 1
    parts = finished.accounting
    assert (parts.remote_hit_tokens, parts.computed_tokens) == (16, 24)
    stats = rig.service.state.instances[InstanceId("d")].stats()
    assert (stats.first.remote_hit, stats.preempted.remote_hit) == (16, 0)


def test_aborting_a_follower_tells_the_coordinator_and_ends_it(rig: Rig) -> None:
    decode = start(rig)
    assert decode.abort(RequestId("r")) is None
    rig.run_until_idle("d")
    assert rig.finished("r").reason == "aborted"
    assert not decode.follows_prefills()
    assert rig.service.state.handoffs == {}
    assert rig.service.state.counters["ignored_messages"] == 0


def test_aborting_a_follower_that_nobody_was_told_of_ends_it_at_once(rig: Rig) -> None:
    decode = rig.schedulers["d"]
    decode.add(follower())
    assert decode.abort(RequestId("r")) is None
    assert not decode.must_ask()
    (output,) = decode.take_outputs()
    assert output.finished is not None
    assert output.finished.reason == "aborted"


def test_aborting_a_follower_that_loads_waits_for_its_writer(rig: Rig) -> None:
    decode = start(rig)
    rig.ask("p")
    prefill_a_chunk(rig)
    rig.ask("d")
    assert decode.abort(RequestId("r")) == "r"
    assert num_free(rig, "d") == 15
    decode.load_ended(came(8), pulled_bytes=50)
    rig.run_until_idle("d")
    assert rig.finished("r").reason == "aborted"
    assert num_free(rig, "d") == 19
