"""`kvferry demo` with instances of several ranks: outputs, deaths of ranks, and nothing left."""

import os
import signal

import pytest
from tests.integration.test_demo import StartDemo, start_demo

__all__ = ["start_demo"]  # a fixture

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_prefill_and_decode_instances_of_two_layouts_give_equal_outputs(
    start_demo: StartDemo,
) -> None:
    demo = start_demo(
        *("--max-tokens", "8", "--decode", "1"),
        *("--prefill-layout", "pcp=2", "--decode-layout", "dcp=2,interleave=4,block_tokens=8"),
    )
    demo.pid_of("decode-0")
    code, result = demo.end()
    assert code == 0, "".join(demo.lines)
    summary, instances = result["summary"], result["instances"]
    assert (summary["equal"], summary["total"], summary["near_ties"]) == (8, 8, 0)
    assert summary["pulled_bytes"] > 0
    assert {i["id"]: i["layout"] for i in instances} == {
        "prefill-0": "block_tokens=16,pcp=2",
        "decode-0": "block_tokens=8,dcp=2,interleave=4",
    }
    pids = {rank["pid"] for instance in instances for rank in instance["ranks"]}
    assert len(pids) == 4
    assert pids <= demo.family
    demo.assert_nothing_left()


@pytest.mark.long
def test_a_killed_rank_costs_no_request_while_another_instance_lives(
    start_demo: StartDemo,
) -> None:
    demo = start_demo("--max-tokens", "100", "--decode-layout", "dcp=2")
    demo.wait_for(lambda line: "[1/8]" in line)
    os.kill(demo.pid_of("decode-0", 1), signal.SIGKILL)
    code, result = demo.end()
    assert code == 0, "".join(demo.lines)
    assert result["summary"]["equal"] == 8
    assert {r["decode_instance"] for r in result["requests"][3:]} == {"decode-1"}
    demo.assert_nothing_left()
