"""What an engine's queues do when a load fails, against the real coordinator service."""

import pytest
from tests.unit.cluster.test_scheduler import BLOCK, Rig, request

from kvferry.proto.ids import GroupId, RequestId
from kvferry.proto.step_messages import LoadFailure, LoadResult


@pytest.fixture
def rig() -> Rig:
    return Rig()


def short_load(name: str, num_computed_tokens: int) -> LoadResult:
    """Of a load of three blocks, what came of it when its peer died."""
    failure = LoadFailure(
        error_type="UnavailableError",
        message="peer died",
        group_id=GroupId(0),
        block=num_computed_tokens // BLOCK,
    )
    return LoadResult(
        request_id=RequestId(name), num_computed_tokens=num_computed_tokens, failure=failure
    )


def test_what_a_failed_load_left_out_is_computed(rig: Rig) -> None:
    rig.add_instance("p", "prefill").add(request("at-p", range(14), prefill_only=True))
    rig.run_until_idle("p")
    decode = rig.add_instance("d")
    decode.add(request("r", range(14)))
    rig.step("d")
    decode.load_ended(short_load("r", 4), pulled_bytes=100)
    rig.run_until_idle("d")
    accounting = rig.finished("r").accounting
    assert (accounting.remote_hit_tokens, accounting.computed_tokens) == (4, 10)


def test_the_rest_of_a_failed_load_is_loaded_from_another_holder(rig: Rig) -> None:
    for name in ("p", "q"):
        rig.add_instance(name, "prefill").add(request(name, range(14), prefill_only=True))
        # Both compute it: q is asked before p can tell of its blocks.
        rig.step(name)
    for name in ("p", "q"):
        rig.run_until_idle(name)
    decode = rig.add_instance("d")
    decode.add(request("r", range(14)))
    (first,) = rig.step("d")[0].loads
    decode.load_ended(short_load("r", 4), pulled_bytes=100)
    (again,) = rig.ask("d").loads
    sources = [order.load.source.instance_id for order in (first, again)]
    assert sources == ["p", "q"]
    ((before,), (rest,)) = first.loads, again.loads
    assert (rest.first_block, rest.block_ids, rest.hashes) == (
        1,
        before.block_ids[1:],
        before.hashes[1:],
    )
    assert rig.compute("d") == ()
    whole = LoadResult(request_id=RequestId("r"), num_computed_tokens=12)
    decode.load_ended(whole, pulled_bytes=200)
    rig.run_until_idle("d")
    finished = rig.finished("r")
    accounting = finished.accounting
    assert (accounting.remote_hit_tokens, accounting.computed_tokens) == (12, 2)
    assert finished.pulled_bytes == 300


def test_a_request_whose_load_failed_asks_no_peer_when_it_comes_back(rig: Rig) -> None:
    rig.add_instance("p", "prefill").add(request("at-p", range(14), prefill_only=True))
    rig.run_until_idle("p")
    decode = rig.add_instance("d", num_blocks=8)
    decode.add(request("a", range(100, 104), max_tokens=16))
    rig.step("d")
    decode.add(request("r", range(14), max_tokens=8))
    rig.step("d")
    decode.load_ended(short_load("r", 0), pulled_bytes=0)
    rig.run_until_idle("d")
    finished = rig.finished("r")
    assert finished.preemptions == 1
    assert finished.accounting.remote_hit_tokens == 0
