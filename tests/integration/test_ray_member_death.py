"""Nodes die and processes freeze on a Ray cluster: how soon nothing is asked of them any more."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.integration.ray_of_nodes import NODE, home_of, ray_of_nodes
from tests.integration.ray_serving import describe, request, routing
from tests.integration.test_ray_drain import drain_ray_node

from kvferry.cluster.config import ServiceConfig
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.ray_handles import get
from kvferry.cluster.ray_launcher import RayService
from kvferry.cluster.serving.router import Router
from kvferry.cluster.serving.routing import Route
from kvferry.proto.ids import InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Locate, Located
from kvferry.worker.model.loading import inspect_model

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(240)]

ray_api: Any = ray  # parts of Ray's interface are not typed
OUT_OF_USE_S = 3.0
BACK_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head, and three nodes with room for one rank each."""
    with ray_of_nodes(3, head_cpus=0) as running:
        yield running


@pytest.fixture
def service(cluster: Any, tiny_model: Path) -> Iterator[RayService]:
    """One prefill and two decode instances."""
    layout = Layout(block_tokens=16)
    config = ServiceConfig(
        model=str(tiny_model), num_decode=2, prefill_layout=layout, decode_layout=layout
    )
    with RayService(config, inspect_model(config.model).identity) as running:
        running.start(print)
        yield running


def choose_victim(service: RayService, cluster: Any) -> tuple[InstanceId, Any]:
    """A decode instance whose node is not the coordinator's, too, and that node."""
    spared = home_of(service._coordinator)
    for instance_id in (InstanceId("decode-0"), InstanceId("decode-1")):
        home = home_of(service._places[instance_id].rank_0)
        if home != spared:
            (node,) = [one for one in cluster.worker_nodes if one.node_id == home]
            return instance_id, node
    raise AssertionError("no decode instance has a node of its own")


def start_store(service: RayService, node: Any) -> tuple[InstanceId, int]:
    """A store of the service's identity in a process on that node; its name and pid."""
    place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    config = NodeConfig(
        host="127.0.0.1", coordinator=service.control_address, store_bytes=1 << 20, port=0
    )
    actor = (
        ray_api.remote(num_cpus=0, max_concurrency=4)(StoreNode)
        .options(scheduling_strategy=place, lifetime="detached", name="store")
        .remote(config)
    )
    get(actor.start.remote(), timeout_s=60.0, who="the store")
    attached = get(actor.attach.remote(service.identity, 20.0), timeout_s=30.0, who="the store")
    (status,) = [
        one for one in describe(service).instances if one.info.instance_id == attached.instance_id
    ]
    return attached.instance_id, status.info.rank_pids[0]


def found(service: RayService) -> set[InstanceId]:
    """Whom the coordinator would send anybody to."""
    command = Locate(identity_digest=service.identity.digest(), hashes=())
    client = ControlClient(service.control_address, timeout_s=5.0)
    try:
        return {one.source.instance_id for one in client.ask(command, Located).holders}
    finally:
        client.close()


async def seconds_until(is_true: Callable[[], bool], limit_s: float) -> float:
    began_s = time.monotonic()
    while not await asyncio.to_thread(is_true):
        assert time.monotonic() - began_s < limit_s
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


async def decodes_at(router: Router, name: str) -> str:
    return (await router.serve(request(name, 3))).decode_instance


async def is_back(service: RayService, router: Router, victim: InstanceId) -> None:
    """Wait until another life of the instance serves."""
    index = [one.info.instance_id for one in service.instances].index(victim)
    before = service.instances[index].info.incarnation
    async with asyncio.timeout(BACK_S):
        while service.instances[index].info.incarnation == before:
            await asyncio.sleep(0.05)
    await router.serve(request("back", 3), route=Route(decode=victim, prefill=None))


def test_what_was_on_a_node_that_dies_is_out_of_use_soon_and_back_when_there_is_room(
    cluster: Any, service: RayService, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, node = choose_victim(service, cluster)
    store, store_pid = start_store(service, node)
    (pid,) = next(one.info.rank_pids for one in service.instances if one.info.instance_id == victim)

    async def run() -> str:
        async with routing(service) as router:
            await router.serve(request("warm", 3), route=Route(decode=victim, prefill=None))
            assert {victim, store} <= found(service)
            for doomed in (node.all_processes["raylet"][0].process.pid, pid, store_pid):
                os.kill(doomed, signal.SIGKILL)
            waits = (
                lambda: not router.is_alive(victim),
                lambda: victim not in found(service),
                lambda: store not in found(service),
            )
            router_s, instance_s, store_s = await asyncio.gather(
                *(seconds_until(wait, OUT_OF_USE_S) for wait in waits)
            )
            for number in range(3):
                assert await decodes_at(router, f"elsewhere-{number}") != victim
            began_s = time.monotonic()
            cluster.add_node(**NODE)
            await is_back(service, router, victim)
            back_s = time.monotonic() - began_s
        return (
            f"node killed: router {router_s:.2f} s, its instance {instance_s:.2f} s, its store "
            f"{store_s:.2f} s; back {back_s:.1f} s after there was a node again"
        )

    told = asyncio.run(run())
    with capsys.disabled():
        print(f"\n{told}")


def test_a_frozen_engine_and_a_frozen_store_are_out_of_use_soon_and_the_engine_is_replaced(
    cluster: Any, service: RayService, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, node = choose_victim(service, cluster)
    store, store_pid = start_store(service, node)
    (pid,) = next(one.info.rank_pids for one in service.instances if one.info.instance_id == victim)

    async def run() -> str:
        async with routing(service) as router:
            began_s = time.monotonic()
            for frozen in (pid, store_pid):
                os.kill(frozen, signal.SIGSTOP)
            instance_s, store_s = await asyncio.gather(
                seconds_until(lambda: victim not in found(service), OUT_OF_USE_S),
                seconds_until(lambda: store not in found(service), OUT_OF_USE_S),
            )
            for number in range(3):
                assert await decodes_at(router, f"elsewhere-{number}") != victim
            await is_back(service, router, victim)
            back_s = time.monotonic() - began_s
            assert not os.path.exists(f"/proc/{pid}")
            os.kill(store_pid, signal.SIGCONT)
            woken_s = await seconds_until(lambda: store in found(service), 10.0)
        return (
            f"frozen: an instance {instance_s:.2f} s, a store {store_s:.2f} s; the instance is "
            f"back after {back_s:.1f} s, the store {woken_s:.2f} s after it was woken"
        )

    told = asyncio.run(run())
    with capsys.disabled():
        print(f"\n{told}")


def test_an_instance_whose_node_ray_takes_away_starts_again_on_another(
    cluster: Any, service: RayService
) -> None:
    victim, node = choose_victim(service, cluster)
    cluster.add_node(**NODE)
    lives = {one.info.instance_id: one.info.incarnation for one in service.instances}

    def has_begun_anew() -> bool:
        now = {one.info.instance_id: one.info.incarnation for one in service.instances}
        return now.get(victim, lives[victim]) != lives[victim]

    async def run() -> None:
        async with routing(service) as router:
            await asyncio.to_thread(drain_ray_node, cluster.address, node.node_id)
            await seconds_until(has_begun_anew, BACK_S)
            assert await asyncio.to_thread(home_of, service._places[victim].rank_0) != node.node_id
            await router.serve(request("back", 3), route=Route(decode=victim, prefill=None))

    asyncio.run(run())
