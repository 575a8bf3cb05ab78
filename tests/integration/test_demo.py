"""`kvferry demo` as a user runs it: a process of its own, a Ray cluster, real ranks, kills."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.cluster.demo.conversation import PromptWriter, plan_turns
from kvferry.cluster.demo.plan import longest_requests, min_num_blocks
from kvferry.cluster.serving.limits import Limits
from kvferry.proto.group_specs import specs_of
from kvferry.worker.model.loading import inspect_model
from kvferry.worker.model.sampling import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

# With SIGINT ignored, as a shell starts background jobs: an interrupt must be heard all the same.
AS_BACKGROUND_JOB = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
INSTANCE_LINE = re.compile(r"\S+ \((prefill|decode)\): rank 0 at ")


@dataclass
class Demo:
    """One run of the command; everything it says is kept."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)
    family: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    follower: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.follower = threading.Thread(target=self.follow, daemon=True)

    def follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()

    def wait_for(self, found: Callable[[str], object], timeout_s: float = 90) -> str:
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while True:
                for line in self.lines:
                    if found(line):
                        self.remember_family()
                        return line
                left = deadline - time.monotonic()
                assert left > 0, "".join(self.lines)
                assert self.process.poll() is None or self.changed.wait(1), "".join(self.lines)
                self.changed.wait(min(left, 1))

    def pid_of(self, instance: str, rank: int = 0) -> int:
        line = self.wait_for(lambda text: INSTANCE_LINE.search(text) and instance in text)
        match = re.search(rf"rank {rank} at \S+ pid (\d+)", line)
        assert match is not None
        return int(match.group(1))

    def remember_family(self) -> None:
        """Ray's processes are our children's children; after the run none may be left."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.family |= {child.pid for child in children}

    def end(self, timeout_s: float = 120) -> tuple[int, dict[str, Any]]:
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(timeout_s)
        result = json.loads(out) if out.strip() else {}
        return code, result

    def assert_nothing_left(self) -> None:
        assert self.family, "no process was seen while it ran"
        deadline = time.monotonic() + 15
        while left := [pid for pid in self.family if psutil.pid_exists(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


StartDemo = Callable[..., Demo]


@pytest.fixture
def start_demo(tiny_model: Path) -> Any:
    started: list[Demo] = []

    def start(*arguments: str) -> Demo:
        words = ["demo", "--json", "--model", str(tiny_model), "--requests", "8", *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        process = subprocess.Popen(
            [*AS_BACKGROUND_JOB, sys.executable, "-m", "kvferry.cluster.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        demo = Demo(process)
        demo.follower.start()
        started.append(demo)
        return demo

    yield start
    for demo in started:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait(10)
        demo.follower.join(10)
        for pipe in (demo.process.stdout, demo.process.stderr):
            assert pipe is not None
            pipe.close()


def test_every_output_is_equal_every_token_accounted_for_and_nothing_is_left(
    start_demo: StartDemo,
) -> None:
    demo = start_demo("--max-tokens", "8", "--metrics-port", "0")
    demo.pid_of("decode-1")
    told = re.search(r"metrics at http://(\S+)/metrics", demo.wait_for(lambda t: "metrics" in t))
    code, result = demo.end()
    assert code == 0, "".join(demo.lines)
    assert told is not None
    assert result["metrics_address"] == told.group(1)
    assert all(i["ranks"][0]["metrics_address"] for i in result["instances"])
    summary, requests = result["summary"], result["requests"]
    assert (summary["equal"], summary["total"], summary["near_ties"]) == (8, 8, 0)
    assert {r["session"] for r in requests} == {0, 1, 2}
    for one in requests:
        found = one["local_hit_tokens"] + one["remote_hit_tokens"]
        assert found + one["computed_tokens"] == one["prompt_tokens"]
        assert one["prompt_tokens"] == len(one["prompt_token_ids"]) > 1000
        assert one["output_tokens"] == len(one["output_token_ids"])
        assert one["ttft_s"] > 0
    assert sum(r["remote_hit_tokens"] > 0 for r in requests) >= 4
    assert [i["id"] for i in result["instances"]] == ["prefill-0", "decode-0", "decode-1"]
    assert all(i["ranks"][0]["pid"] in demo.family for i in result["instances"])
    assert summary["ttft_pulled_s"] < summary["ttft_recomputed_s"]
    # Of five chunks of 256 tokens, at least one came before the last was computed.
    assert summary["overlap_ahead_tokens"] >= 256
    assert 0 < summary["after_prefill_overlapped_s"] < summary["ttft_overlapped_s"]
    assert 0 < summary["after_prefill_in_turn_s"] < summary["ttft_in_turn_s"]
    demo.assert_nothing_left()


def test_a_killed_decode_rank_costs_no_request_while_another_lives(start_demo: StartDemo) -> None:
    demo = start_demo("--max-tokens", "200")
    victim = demo.pid_of("decode-0")
    demo.wait_for(lambda line: "[1/8]" in line)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    demo.wait_for(lambda line: "instance decode-0 is started again" in line)
    code, result = demo.end()
    assert code == 0, "".join(demo.lines)
    assert time.monotonic() - killed < 60
    assert result["summary"]["equal"] == 8
    demo.assert_nothing_left()


def test_the_death_of_a_rank_of_the_only_decode_instance_is_told_within_30_s_naming_it(
    start_demo: StartDemo,
) -> None:
    demo = start_demo("--max-tokens", "200", "--decode", "1", "--decode-layout", "dcp=2")
    victim = demo.pid_of("decode-0", 1)
    demo.wait_for(lambda line: "[1/8]" in line)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code, result = demo.end()
    assert time.monotonic() - killed < 30
    assert code == 1
    assert result["error"]["type"] == "InstanceDiedError"
    assert "decode-0" in json.dumps(result["error"])
    demo.assert_nothing_left()


@pytest.mark.long
def test_a_small_pool_preempts_and_stays_equal(start_demo: StartDemo, tiny_model: Path) -> None:
    smallest = smallest_pool(tiny_model, max_tokens=64)
    num_blocks = str(smallest + 4)
    demo = start_demo("--max-tokens", "64", "--decode", "1", "--num-blocks", num_blocks)
    demo.pid_of("decode-0")
    code, result = demo.end()
    assert code == 0, "".join(demo.lines)
    assert result["summary"]["min_num_blocks"] == smallest
    assert result["summary"]["preemptions"] >= 1
    assert result["summary"]["equal"] == 8


def test_a_hybrid_model_is_served_with_equal_outputs(
    start_demo: StartDemo, tiny_hybrid_model: Path
) -> None:
    # A block takes 4 KiB; 512 of them do not hold the model's longest request.
    size = ("--kv-bytes", "2MiB", "--max-model-len", "auto")
    demo = start_demo("--model", str(tiny_hybrid_model), *size)
    code, result = demo.end()
    assert code == 0, "".join(demo.lines)
    for instance in result["instances"]:
        assert (instance["num_blocks"], instance["block_bytes"]) == (512, 4096)
        assert 7000 < instance["max_model_len"] < 8192
    assert any(
        "prefill-0 has layout block_tokens=16 and 512 blocks of 4096 bytes, room for 1.0" in x
        for x in demo.lines
    )
    summary = result["summary"]
    assert (summary["equal"], summary["total"]) == (8, 8)
    for served in result["requests"]:
        found = served["local_hit_tokens"] + served["remote_hit_tokens"]
        assert found + served["computed_tokens"] == served["prompt_tokens"]
    assert sum(served["remote_hit_tokens"] for served in result["requests"]) > 0


def smallest_pool(model: Path, *, max_tokens: int) -> int:
    facts = inspect_model(str(model))
    writer = PromptWriter(facts.tokenizer, facts.eos_token_ids)
    longest = longest_requests(plan_turns(8), writer, SamplingParams(max_tokens=max_tokens))
    limits = Limits(
        num_blocks=2,
        block_tokens=16,
        max_model_len=8192,
        token_budget=256,
        max_running=16,
        specs=specs_of(facts.identity, 16),
    )
    return min_num_blocks(tuple(longest), limits)


def test_a_pool_below_the_minimum_is_refused_before_anything_starts(
    start_demo: StartDemo,
) -> None:
    demo = start_demo("--num-blocks", "60")
    code, result = demo.end()
    assert code == 2
    given = result["error"]["given"]
    assert given["have_blocks"] == 60 < given["needed_blocks"]
    assert not any("Ray" in line for line in demo.lines)


def test_too_few_bytes_are_refused_before_anything_starts_with_the_longest_that_would_fit(
    start_demo: StartDemo,
) -> None:
    demo = start_demo("--kv-bytes", "1MiB")
    code, result = demo.end()
    assert code == 2
    # 256 blocks of 16 tokens, less the null block.
    assert result["error"]["allowed"] == {"num_blocks": 513, "max_model_len": 255 * 16}
    assert not any("Ray" in line for line in demo.lines)


def test_a_taken_port_is_refused_before_anything_starts(start_demo: StartDemo) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        demo = start_demo("--port", str(taken.getsockname()[1]))
        code, result = demo.end()
    assert code == 2
    assert result["error"]["type"] == "PortTakenError"
    assert not any("Ray" in line for line in demo.lines)


def test_an_address_where_no_cluster_listens_is_told_within_seconds(start_demo: StartDemo) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        demo = start_demo("--address", f"127.0.0.1:{nobody.getsockname()[1]}")
        code, result = demo.end(timeout_s=60)
    assert code == 1
    assert result["error"]["type"] == "UnavailableError"


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGINT, "control front"),
        pytest.param(signal.SIGTERM, "checking", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_ends_with_130_says_so_and_leaves_nothing(
    start_demo: StartDemo, number: signal.Signals, phase: str
) -> None:
    demo = start_demo("--max-tokens", "60", "--decode", "1")
    demo.pid_of("decode-0")
    demo.wait_for(lambda line: phase in line)
    demo.process.send_signal(number)
    code, result = demo.end(timeout_s=30)
    assert code == 130
    assert result["error"]["type"] == "Interrupted"
    demo.assert_nothing_left()
