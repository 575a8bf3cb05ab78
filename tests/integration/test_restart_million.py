"""A store of a million blocks whose coordinator is killed: how long nobody finds them."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tests.builders import make_identity

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.client import ModelCache, connect
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_handles import end_actors, get
from kvferry.cluster.ray_record import RayRecord, find_front
from kvferry.proto.errors import KvferryError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import FIRST_GROUP, pack_group
from kvferry.worker.reservations import reserving
from kvferry.worker.service import WorkerService

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

ray_api: Any = ray  # parts of Ray's interface are not typed
WHO = "the coordinator"
MUST_S = 10.0
IDENTITY = make_identity(num_layers=1)
SCHEME = make_scheme(hash_block_tokens=4)
NUM_BLOCKS = 1_000_000
PROMPT_BLOCKS = 250
NUM_PROMPTS = NUM_BLOCKS // PROMPT_BLOCKS


@pytest.fixture
def coordinator() -> Iterator[tuple[Any, FrontAddresses]]:
    """An actor that Ray makes anew, and where it serves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with ray_cluster.connected("local", num_ranks=1, namespace=naming.new_namespace()):
            actor = (
                ray_api.remote(**OPTIONS)(RayCoordinatorActor)
                .options(name=naming.coordinator_name("million"))
                .remote(service_id="million", fronts=FrontSettings(), scheme=SCHEME)
            )
            try:
                yield actor, get(actor.start.remote(), timeout_s=60.0, who=WHO)
            finally:
                end_actors([actor], 1.0)
                RayRecord("million").delete()


def prompt(number: int) -> list[int]:
    return [number, *range(1, 4 * PROMPT_BLOCKS)]


def layer(value: float) -> list[torch.Tensor]:
    return [torch.full((2, 4 * PROMPT_BLOCKS, 1, 8), value)]


def fill(worker: WorkerService, prompts: range) -> None:
    """Let the store hold the blocks of these prompts, without bytes of theirs."""
    assert worker.reserver is not None
    for number in prompts:
        hashes = hash_tokens(SCHEME, prompt(number))
        with reserving(worker.reserver, worker.residency, FIRST_GROUP, hashes) as reservation:
            worker.residency.mark_written(
                (pack_group(one, FIRST_GROUP), block)
                for one, block in zip(hashes, reservation.block_ids, strict=True)
                if block is not None
            )
            reservation.num_written = len(hashes)


def num_found(cache: ModelCache, number: int) -> int:
    try:
        return cache.lookup(prompt(number)).num_blocks
    except KvferryError:
        return 0


def test_a_million_blocks_are_served_again_within_ten_seconds_of_the_coordinators_death(
    coordinator: tuple[Any, FrontAddresses],
) -> None:
    actor, addresses = coordinator
    config = NodeConfig(
        host="127.0.0.1",
        coordinator=addresses.control,
        store_bytes=(NUM_BLOCKS + 1) * IDENTITY.block_bytes(4),
        port=0,
    )
    node = StoreNode(config, find_front("million"))
    try:
        with connect(node.start(), timeout_s=2.0) as ferry:
            node.attach(IDENTITY, 30.0)
            cache = ferry.model(IDENTITY)
            cache.store(prompt(0), layer(1.0))
            fill(node._stores[IDENTITY].worker._started(), range(1, NUM_PROMPTS - 1))
            cache.store(prompt(NUM_PROMPTS - 1), layer(2.0))
            (before,) = ferry.describe().instances
            assert before.num_cached_blocks == NUM_BLOCKS
            ask = actor.__ray_call__.remote(lambda _: os.getpid())
            pid = get(ask, timeout_s=10.0, who=WHO)
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            # The last written are told last, and only then may anything be stored again.
            while num_found(cache, NUM_PROMPTS - 1) < PROMPT_BLOCKS:
                assert time.monotonic() < killed_s + 60.0
                time.sleep(0.02)
            into = layer(0.0)
            assert cache.fetch(prompt(0), into) == 4 * PROMPT_BLOCKS
            assert bool((into[0] == 1.0).all())
            assert cache.store(prompt(NUM_PROMPTS), layer(3.0)) == 4 * PROMPT_BLOCKS
            took_s = time.monotonic() - killed_s
            print(f"serving again after {took_s:.2f} s")
            (after,) = ferry.describe().instances
            assert (after.num_cached_blocks, after.state) == (NUM_BLOCKS, "live")
            assert took_s <= MUST_S
    finally:
        node.stop()
