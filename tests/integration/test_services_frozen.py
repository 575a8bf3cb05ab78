"""Processes of a service of nodes freeze: the others have Ray make them anew."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tests.builders import make_identity

from kvferry.cluster import naming, ray_cluster, ray_services
from kvferry.cluster.client import connect
from kvferry.cluster.node_client import NodeClient
from kvferry.cluster.ray_handles import get
from kvferry.cluster.up_config import UpConfig
from kvferry.proto.errors import KvferryError

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(180)]

ray_api: Any = ray  # parts of Ray's interface are not typed
IDENTITY = make_identity(num_layers=2, num_kv_heads=3)
LIMIT_S = 60.0


@pytest.fixture
def address() -> Iterator[str]:
    """The front of the only node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = UpConfig(store_bytes=1 << 20, name="one", hash_block_tokens=8, port=port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with ray_cluster.connected("local", num_ranks=1, namespace=naming.SERVICES_NAMESPACE):
            (node,) = ray_services.up(config, print).nodes
            yield node.address
            ray_services.down("one")


def ask(name: str, question: Callable[[Any], Any]) -> Any:
    """Ask an actor something of itself."""
    ref = ray_api.get_actor(name).__ray_call__.remote(question)
    return get(ref, timeout_s=5.0, who=name)


def pid_of(name: str) -> int:
    return int(ask(name, lambda _: os.getpid()))


def has_heard(coordinator: str, node: str) -> bool:
    """Tell whether a coordinator knows that the node has started."""
    return bool(ask(coordinator, lambda it: it._frozen._canaries[node].has_answered))


def wait_until(is_true: Callable[[], bool]) -> float:
    """Return how many seconds it took; what cannot be asked yet is asked again."""
    began_s, last = time.monotonic(), "no error"
    while time.monotonic() - began_s < LIMIT_S:
        try:
            if is_true():
                return time.monotonic() - began_s
        except KvferryError as error:
            last = str(error)
        time.sleep(0.1)
    raise AssertionError(f"it did not come true: {last}")


def test_a_frozen_coordinator_and_a_frozen_node_are_made_anew(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = naming.node_name("one", ray_cluster.node_host())
    coordinator, node = pid_of(naming.coordinator_name("one")), pid_of(name)
    with contextlib.closing(NodeClient(address)) as engine:
        engine.attach(IDENTITY, timeout_s=10.0)
    with connect(address, timeout_s=5.0) as ferry:
        epoch = ferry.describe().epoch
        os.kill(coordinator, signal.SIGSTOP)

        def is_back() -> bool:
            described = ferry.describe()
            states = [one.state for one in described.instances]
            return described.epoch == epoch + 1 and states == ["live"]

        coordinator_s = wait_until(is_back)
    wait_until(lambda: has_heard(naming.coordinator_name("one"), name))
    os.kill(node, signal.SIGSTOP)
    node_s = wait_until(lambda: pid_of(name) != node)
    with capsys.disabled():
        print(f"\nback after {coordinator_s:.1f} s (coordinator) and {node_s:.1f} s (node)")
