"""The process of a store freezes: it is suspected, taken for dead, and comes back when it wakes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from tests.integration.node_service import BLOCK_TOKENS, IDENTITIES
from tests.waiting import wait_until

from kvferry.cluster.client import connect
from kvferry.cluster.control_client import ControlClient
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.hashing import make_scheme
from kvferry.proto.messages import Describe, Description

SUSPECT_AFTER_S, DEAD_AFTER_S = 0.6, 2.0
LIMIT_S = 30.0
IDENTITY = IDENTITIES[0]
TOKENS = list(range(2 * BLOCK_TOKENS))
A_NODE = """
import sys
from kvferry.cluster import store_watch
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from tests.integration.node_service import IDENTITIES

store_watch.WATCH_S = 0.05
node = StoreNode(
    NodeConfig(host="127.0.0.1", coordinator=sys.argv[1], store_bytes=1 << 20, port=0)
)
address = node.start()
node.attach(IDENTITIES[0], 10.0)
print(address, flush=True)
sys.stdin.read()
node.stop()
"""


@pytest.fixture
def coordinator() -> Iterator[CoordinatorActor]:
    actor = CoordinatorActor(
        scheme=make_scheme(hash_block_tokens=BLOCK_TOKENS),
        registry=ProcessRegistry(),
        suspect_after_s=SUSPECT_AFTER_S,
        dead_after_s=DEAD_AFTER_S,
        check_invariants=True,
        tick_interval_s=0.02,
    )
    actor.start(lambda call: ControlServer(call, bind="127.0.0.1", port=0, insecure=False))
    yield actor
    actor.stop()


@pytest.fixture
def node(coordinator: CoordinatorActor) -> Iterator["subprocess.Popen[str]"]:
    """A process with a node and its store, which is left as it was started."""
    words = [sys.executable, "-c", A_NODE, str(coordinator.front_address())]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_store_that_freezes_is_used_no_more_and_all_it_holds_is_there_when_it_wakes(
    coordinator: CoordinatorActor, node: "subprocess.Popen[str]"
) -> None:
    assert node.stdout is not None
    address = node.stdout.readline().strip()
    with (
        closing(ControlClient(str(coordinator.front_address()), timeout_s=5.0)) as control,
        connect(str(coordinator.front_address()), timeout_s=5.0) as ferry,
    ):

        def states() -> list[str]:
            return [one.state for one in control.ask(Describe(), Description).instances]

        cache = ferry.model(IDENTITY)
        assert cache.store(TOKENS, layers_of(3.0)) == len(TOKENS)
        assert address
        os.kill(node.pid, signal.SIGSTOP)
        wait_until(lambda: states() == ["suspect"], LIMIT_S)
        assert cache.lookup(TOKENS).num_tokens == 0
        wait_until(lambda: states() == [], LIMIT_S)
        os.kill(node.pid, signal.SIGCONT)
        wait_until(lambda: states() == ["live"], LIMIT_S)
        into = layers_of(0.0)
        assert cache.fetch(TOKENS, into) == len(TOKENS)
        assert all(bool((layer == 3.0).all()) for layer in into)
        counters = control.ask(Describe(), Description).counters
        assert (counters["deaths"], counters["returns"]) == (1, 1)


def layers_of(value: float) -> list[torch.Tensor]:
    return [torch.full((2, len(TOKENS), 3, 8), value) for _ in range(2)]
