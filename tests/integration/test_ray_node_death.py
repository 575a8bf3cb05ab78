"""The node of the coordinator dies: Ray makes it anew on another one, and all find it there."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tests.builders import make_identity
from tests.integration.ray_of_nodes import home_of, ray_of_nodes

from kvferry.cluster.client import ModelCache, connect
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_handles import end_actors, get
from kvferry.cluster.ray_record import find_front
from kvferry.proto.errors import DeadlineError, UnavailableError
from kvferry.proto.hashing import make_scheme

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(180)]

ray_api: Any = ray  # parts of Ray's interface are not typed
WHO = "the coordinator"
IDENTITY = make_identity(num_layers=1)
TOKENS = list(range(8))


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and two nodes that may have the coordinator."""
    with ray_of_nodes(2, resources={"coordinator": 1}) as running:
        yield running


def test_the_coordinator_goes_on_at_another_node_and_a_store_tells_it_what_it_holds(
    cluster: Any,
) -> None:
    actor = (
        ray_api.remote(**OPTIONS)(RayCoordinatorActor)
        .options(resources={"coordinator": 0.001})
        .remote(service_id="s", fronts=FrontSettings(), scheme=make_scheme(hash_block_tokens=4))
    )
    addresses: FrontAddresses = get(actor.start.remote(), timeout_s=60.0, who=WHO)
    config = NodeConfig(
        host="127.0.0.1", coordinator=addresses.control, store_bytes=1 << 16, port=0
    )
    node = StoreNode(config, find_front("s"))
    try:
        with connect(node.start(), timeout_s=2.0) as ferry:
            node.attach(IDENTITY, 10.0)
            cache = ferry.model(IDENTITY)
            cache.store(TOKENS, [torch.ones(2, 8, 1, 8)])
            epoch, home = ferry.describe().epoch, home_of(actor)
            (its_node,) = [one for one in cluster.worker_nodes if one.node_id == home]
            # Its other processes live on for a while, the coordinator's may be among them.
            for raylet in its_node.all_processes["raylet"]:
                os.kill(raylet.process.pid, signal.SIGKILL)
            end_s = time.monotonic() + 60.0
            while epoch_where_found(ferry, cache) != epoch + 1:
                assert time.monotonic() < end_s
                time.sleep(0.1)
        assert home_of(actor) != home
    finally:
        node.stop()
        end_actors([actor], 1.0)


def epoch_where_found(ferry: Any, cache: ModelCache) -> int | None:
    """The coordinator's epoch, if it finds what was stored."""
    try:
        if cache.lookup(TOKENS).num_tokens == len(TOKENS):
            return int(ferry.describe().epoch)
    except (UnavailableError, DeadlineError):
        pass
    return None
