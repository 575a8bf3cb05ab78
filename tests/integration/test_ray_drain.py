"""Ray takes a node away: its store's blocks are at another node before it goes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.builders import make_identity
from tests.integration.ray_of_nodes import ray_of_nodes

from kvferry.cluster.client import connect
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.node_client import NodeClient
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_draining import leaving_nodes
from kvferry.cluster.ray_handles import end_actors, get
from kvferry.cluster.ray_store_node import RayStoreNode
from kvferry.proto.hashing import make_scheme

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(180)]

ray_api: Any = ray  # parts of Ray's interface are not typed
IDENTITY = make_identity(num_layers=1)
TOKENS = list(range(8))
DEADLINE_S = 60


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and one node more."""
    with ray_of_nodes(1) as running:
        yield running


def start_node(coordinator: str, host: str, node_id: str) -> tuple[Any, str]:
    """Start a node of the service at a Ray node; return it and its front's address."""
    config = NodeConfig(host=host, coordinator=coordinator, store_bytes=1 << 16, port=0)
    actor = (
        ray_api.remote(**OPTIONS)(RayStoreNode)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(config, "s")
    )
    return actor, get(actor.start.remote(), timeout_s=60.0, who="a node")


def attach(front: str) -> str:
    client = NodeClient(front)
    try:
        return client.attach(IDENTITY, timeout_s=10.0).instance_id
    finally:
        client.close()


def drain_ray_node(address: str, node_id: str) -> None:
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", address]
    command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "a test", "--deadline-remaining-seconds", str(DEADLINE_S)]
    subprocess.run(command, check=True, capture_output=True, timeout=60.0)


def test_a_store_on_a_node_that_goes_is_drained_and_its_blocks_are_found_at_another(
    cluster: Any,
) -> None:
    head, other = cluster.head_node.node_id, cluster.worker_nodes.copy().pop().node_id
    coordinator = (
        ray_api.remote(**OPTIONS)(RayCoordinatorActor)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False))
        .remote(service_id="s", fronts=FrontSettings(), scheme=make_scheme(hash_block_tokens=4))
    )
    addresses: FrontAddresses = get(coordinator.start.remote(), timeout_s=60.0, who="coordinator")
    going, going_front = start_node(addresses.control, "127.0.0.2", other)
    staying, staying_front = start_node(addresses.control, "127.0.0.1", head)
    try:
        with connect(addresses.control, timeout_s=5.0) as ferry:
            first = attach(going_front)
            cache = ferry.model(IDENTITY)
            assert cache.store(TOKENS, [torch.ones(2, 8, 1, 8)]) == 8
            second = attach(staying_front)
            assert {
                one.info.instance_id: one.info.rank_nodes for one in ferry.describe().instances
            } == {
                first: (other,),
                second: (head,),
            }
            assert leaving_nodes() == {}
            drain_ray_node(cluster.address, other)
            left_s = leaving_nodes()[other]
            assert left_s is not None
            assert DEADLINE_S - 30.0 < left_s <= DEADLINE_S
            end_s = time.monotonic() + 30.0
            while [one.info.instance_id for one in ferry.describe().instances] != [second]:
                assert time.monotonic() < end_s
                time.sleep(0.1)
            assert ferry.describe().counters["drained_blocks"] == 2
            into = [torch.zeros(2, 8, 1, 8)]
            assert cache.fetch(TOKENS, into) == 8
            assert bool((into[0] == 1).all())
    finally:
        end_actors([going, staying, coordinator], 1.0)
