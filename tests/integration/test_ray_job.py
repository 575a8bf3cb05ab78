"""kvferry as a Ray job: `ray start`, `ray job submit`, `ray job stop`, and what is left after."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.builders import make_identity

from kvferry.cluster.node_client import NodeClient

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

BIN = Path(sys.executable).parent
ACTOR_CLASSES = {"RayCoordinatorActor", "RankActor", "Rank", "RayStoreNode"}
RANK_PID = re.compile(r"rank \d+ at \S+ pid (\d+)")
DEMO = ("demo", "--address", "auto", "--json", "--requests", "8", "--prefill", "1", "--decode", "1")
TERMINAL = {"SUCCEEDED", "FAILED", "STOPPED"}
HTTP_TIMEOUT_S = 10.0
CLI_TIMEOUT_S = 60.0
FRESH_CLUSTER_S = 60.0


def poll(found: Callable[[], Any], *, timeout_s: float, what: Callable[[], object]) -> Any:
    """Return the first truthy answer, or fail with what was seen."""
    deadline = time.monotonic() + timeout_s
    while not (answer := found()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return answer


@dataclass(frozen=True)
class Head:
    """A head node of our own, spoken to as its users do."""

    process: "subprocess.Popen[bytes]"
    url: str
    gcs_address: str
    environment: dict[str, str]

    def cli(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [BIN / "ray", "job", words[0], "--address", self.url, *words[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=CLI_TIMEOUT_S,
            check=False,
        )

    def submit(self, name: str, *words: str) -> None:
        """Submit a command; a fresh cluster has no job agent for some seconds (HTTP 500)."""
        entrypoint = [str(BIN / "kvferry"), *words]
        deadline = time.monotonic() + FRESH_CLUSTER_S
        while True:
            done = self.cli("submit", "--no-wait", "--submission-id", name, "--", *entrypoint)
            if done.returncode == 0:
                return
            said = done.stdout + done.stderr
            assert "500" in said, said
            assert time.monotonic() < deadline, said

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/{path}", timeout=HTTP_TIMEOUT_S) as reply:
            return json.load(reply)

    def status(self, name: str) -> str:
        return str(self.ask(f"jobs/{name}")["status"])

    def logs(self, name: str) -> str:
        return str(self.ask(f"jobs/{name}/logs")["logs"])

    def alive_actors(self) -> list[str]:
        rows = self.ask("v0/actors?detail=1")["data"]["result"]["result"]
        ours = [row for row in rows if row["class_name"] in ACTOR_CLASSES]
        return [f"{row['name']} {row['state']}" for row in ours if row["state"] != "DEAD"]

    def created_groups(self) -> list[str]:
        rows = self.ask("v0/placement_groups?detail=1")["data"]["result"]["result"]
        return [row["name"] for row in rows if row["state"] == "CREATED"]

    def answers(self) -> bool:
        assert self.process.poll() is None, "ray start has ended"
        with suppress(urllib.error.URLError, ConnectionError):
            return bool(self.ask("version"))
        return False


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def end_family(process: "subprocess.Popen[bytes]") -> None:
    """End `ray start --block` and all that it has started; other clusters are not ours."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait(10)
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == []


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # Sockets lie in the folder, and their paths may have 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="kvf-"))
    gcs, dashboard, agent, agent_grpc, runtime_env, metrics, client = free_ports(7)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    words = ["--head", "--block", "--node-ip-address", "127.0.0.1", "--num-cpus", "2"]
    words += ["--port", gcs, "--dashboard-host", "127.0.0.1", "--dashboard-port", dashboard]
    words += ["--dashboard-agent-listen-port", agent, "--dashboard-agent-grpc-port", agent_grpc]
    words += ["--runtime-env-agent-port", runtime_env, "--metrics-export-port", metrics]
    words += ["--ray-client-server-port", client, "--temp-dir", str(folder / "ray")]
    words += ["--object-store-memory", str(80 * 1024 * 1024), "--disable-usage-stats"]
    with (folder / "ray-start.log").open("wb") as log:
        process = subprocess.Popen(
            [BIN / "ray", "start", *words], env=environment, stdout=log, stderr=log
        )
    try:
        url, gcs_address = f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}"
        head = Head(process, url, gcs_address, environment)
        poll(head.answers, timeout_s=60, what=lambda: (folder / "ray-start.log").read_text("utf-8"))
        yield head
    finally:
        end_family(process)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_serves_and_every_output_is_equal(head: Head, tiny_model: Path) -> None:
    head.submit("good", *DEMO, "--max-tokens", "8", "--model", str(tiny_model))
    poll(lambda: head.status("good") in TERMINAL, timeout_s=120, what=lambda: head.logs("good"))
    logs = head.logs("good")
    assert head.status("good") == "SUCCEEDED", logs
    # A job's stdout and stderr are one text; the result is the only line that is an object.
    [result] = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
    assert (result["summary"]["equal"], result["summary"]["total"]) == (8, 8)
    assert head.created_groups() == []
    assert head.alive_actors() == []


def test_a_stopped_job_leaves_no_actor_no_group_and_no_process(
    head: Head, tiny_model: Path
) -> None:
    words = ("--decode-layout", "dcp=2", "--max-tokens", "500", "--model", str(tiny_model))
    head.submit("stopped", *DEMO, *words)

    def logs() -> str:
        return head.logs("stopped")

    poll(lambda: "[1/8]" in logs() or head.status("stopped") in TERMINAL, timeout_s=90, what=logs)
    ranks = {int(pid) for pid in RANK_PID.findall(logs())}
    assert len(ranks) == 3
    assert all(psutil.pid_exists(pid) for pid in ranks)
    assert len(head.alive_actors()) == 4
    assert len(head.created_groups()) == 2

    def left() -> list[object]:
        alive = [pid for pid in ranks if psutil.pid_exists(pid)]
        return [*head.alive_actors(), *head.created_groups(), *alive]

    stopped = head.cli("stop", "--no-wait", "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    poll(lambda: head.status("stopped") == "STOPPED", timeout_s=20, what=logs)
    poll(lambda: not left(), timeout_s=20, what=left)


@pytest.mark.long
def test_a_service_that_a_job_has_started_outlives_it_until_it_is_removed(head: Head) -> None:
    (port,) = free_ports(1)
    head.submit("up", "up", "--store-gib", "0.001", "--port", port, "--json")
    poll(lambda: head.status("up") in TERMINAL, timeout_s=90, what=lambda: head.logs("up"))
    assert head.status("up") == "SUCCEEDED", head.logs("up")
    assert len(head.alive_actors()) == 2
    with closing(NodeClient(f"127.0.0.1:{port}")) as client:
        assert client.attach(make_identity(), timeout_s=10.0).num_blocks > 8
    removed = subprocess.run(
        [BIN / "kvferry", "down", "--ray-address", head.gcs_address, "--json"],
        env=head.environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=CLI_TIMEOUT_S,
        check=True,
    )
    assert len(json.loads(removed.stdout)["hosts"]) == 1
    assert head.alive_actors() == []
