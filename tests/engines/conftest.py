"""One service for the tests of this folder, and one engine without it for comparison."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines.engines import PYTHON, Engine, running_engines

from kvferry.cluster.control_client import ControlClient
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.hashing import make_scheme
from kvferry.proto.messages import Describe, Description, InstanceStatus
from kvferry.worker.model.demo_model import ensure_demo_model

STORE_BYTES = 1 << 30
SETTLE_TIMEOUT_S = 20.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            if PYTHON is None:
                item.add_marker(pytest.mark.skip(reason="KVFERRY_VLLM_PYTHON is not set"))
            item.add_marker(pytest.mark.timeout(900))


@dataclass
class Service:
    """A coordinator, and a node in a process of its own."""

    coordinator: CoordinatorActor
    store_bytes: int
    address: str = ""
    process: "subprocess.Popen[str] | None" = None

    def start_node(self) -> None:
        port = self.address.rpartition(":")[2] or "0"
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).parent / "node_process.py"),
                str(self.coordinator.front_address()),
                port,
                str(self.store_bytes),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the node did not start"

    def kill_node(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def instances(self) -> list[InstanceStatus]:
        client = ControlClient(str(self.coordinator.front_address()), 10.0)
        try:
            return list(client.ask(Describe(), Description).instances)
        finally:
            client.close()

    def wait_cached_blocks(self, count: int) -> None:
        """Wait until the stores hold so many blocks together."""
        end_s = time.monotonic() + SETTLE_TIMEOUT_S
        while (found := sum(one.num_cached_blocks for one in self.instances())) != count:
            assert time.monotonic() < end_s, f"{found} blocks are cached, not {count}"
            time.sleep(0.01)


def make_service(store_bytes: int, *, check_invariants: bool = True) -> Iterator[Service]:
    coordinator = CoordinatorActor(
        scheme=make_scheme(hash_block_tokens=16),
        registry=ProcessRegistry(),
        check_invariants=check_invariants,
    )
    coordinator.start(lambda call: ControlServer(call, bind="127.0.0.1", port=0, insecure=False))
    service = Service(coordinator, store_bytes)
    service.start_node()
    yield service
    service.kill_node()
    coordinator.stop()


@pytest.fixture
def service() -> Iterator[Service]:
    yield from make_service(STORE_BYTES)


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """An engine without the connector, and without a prefix cache: it computes everything."""
    with running_engines(model, {"enable_prefix_caching": False}) as (engine,):
        yield engine


def tokens(seed: int, count: int) -> list[int]:
    """Return a prompt of random words."""
    chooser = random.Random(seed)
    return [chooser.randrange(1000, 40000) for _ in range(count)]


def assert_equal_outputs(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Tokens equal, and log-probabilities within 1e-3."""
    assert [one["tokens"] for one in found] == [one["tokens"] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
