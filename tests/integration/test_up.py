"""`kvferry up`, `status` and `down` as a user runs them, with a Ray cluster that `up` starts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.builders import make_identity

from kvferry.cluster.client import ModelCache, connect
from kvferry.cluster.node_client import NodeClient
from kvferry.proto.errors import DeadlineError, UnavailableError

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(180)]

KVFERRY = Path(sys.executable).parent / "kvferry"
TIMEOUT_S = 90.0


class Shell:
    """A user of one service in a local Ray cluster."""

    def __init__(self, state: Path) -> None:
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "XDG_STATE_HOME": str(state),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.record = state / "kvferry" / "ray-one.json"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def words(self, command: str, *words: str) -> list[str]:
        where = ["--name", "one", "--ray-address", "local", "--json"]
        return [str(KVFERRY), command, *where, *words]

    def run(self, command: str, *words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            self.words(command, *words),
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    def up(self, *words: str) -> tuple[int, dict[str, Any]]:
        return self.run("up", "--store-gib", "0.001", "--port", str(self.port), *words)

    def family(self) -> list[psutil.Process]:
        """The keeper of the cluster and all that it has started."""
        keeper = psutil.Process(json.loads(self.record.read_text())["pid"])
        return [keeper, *keeper.children(recursive=True)]

    def require_nothing_left(self, family: list[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        assert not self.record.exists()
        socket.create_server(("127.0.0.1", self.port)).close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    one = Shell(tmp_path)
    yield one
    if one.record.exists():
        for process in one.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_service_with_a_ray_cluster_of_its_own_is_started_shown_and_removed(
    shell: Shell,
) -> None:
    code, places = shell.up()
    assert code == 0
    (node,) = places["nodes"]
    assert node["address"] == f"127.0.0.1:{shell.port}"
    family = shell.family()
    with closing(NodeClient(node["address"])) as client:
        store = client.attach(make_identity(), timeout_s=10.0)
    code, shown = shell.run("status")
    assert code == 0
    assert [one["id"] for one in shown["instances"]] == [store.instance_id]
    assert shell.up() == (0, places | {"was_running": True})
    code, refused = shell.up("--hash-seed", "7")
    assert (code, refused["error"]["type"]) == (2, "SchemeMismatchError")
    code, refused = shell.up("--warm-share", "0.25")
    assert (code, refused["error"]["type"]) == (2, "MismatchError")
    assert refused["error"]["given"] == {"warm_share": 0.25}

    assert shell.run("down") == (
        0,
        {"name": "one", "coordinator": True, "hosts": [node["host"]]},
    )
    shell.require_nothing_left(family)
    assert shell.run("down") == (0, {"name": "one", "coordinator": False, "hosts": []})


def test_a_coordinator_that_is_killed_comes_back_and_so_does_the_store_with_all_it_holds(
    shell: Shell,
) -> None:
    _, places = shell.up("--hash-block-tokens", "4")
    (node,) = places["nodes"]
    identity, tokens = make_identity(num_layers=1), list(range(8))
    with connect(node["address"]) as ferry, closing(NodeClient(node["address"])) as client:
        client.attach(identity, timeout_s=10.0)
        cache = ferry.model(identity)
        assert cache.store(tokens, [torch.ones(2, 8, 1, 8)]) == 8
        epoch = ferry.describe().epoch
        for life in (1, 2):
            names = [(one, one.cmdline()) for one in shell.family()]
            (coordinator,) = [one for one, name in names if "RayCoordinatorActor" in str(name)]
            coordinator.kill()
            coordinator.wait(10)
            wait_until(lambda: holds(cache, tokens))
            assert ferry.describe().epoch == epoch + life
    code, shown = shell.run("status")
    assert (code, shown["epoch"]) == (0, epoch + 2)
    assert [one["cached_blocks"] for one in shown["instances"]] == [2]
    assert shell.run("down")[0] == 0


def holds(cache: ModelCache, tokens: list[int]) -> bool:
    """Whether all of them are found; not while nobody answers."""
    try:
        return cache.lookup(tokens).num_tokens == len(tokens)
    except (UnavailableError, DeadlineError):
        return False


def test_an_interrupt_while_it_starts_leaves_nothing(shell: Shell) -> None:
    process = subprocess.Popen(
        shell.words("up", "--store-gib", "0.001", "--port", str(shell.port)),
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(shell.record.exists)
    family = shell.family()
    assert process.stderr is not None
    while "starting the coordinator" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert json.loads(out)["error"]["type"] == "Interrupted"
    shell.require_nothing_left(family)
