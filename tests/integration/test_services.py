"""Services of nodes on a real Ray cluster: started, used from outside Ray, found, removed."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from tests.builders import make_identity

from kvferry.cluster import cli, naming, ray_cluster, ray_services
from kvferry.cluster.attached_store import AttachedStore
from kvferry.cluster.client import connect
from kvferry.cluster.node_client import NodeClient
from kvferry.cluster.up_config import ServicePlaces, UpConfig
from kvferry.proto.errors import (
    KvferryError,
    MismatchError,
    NotFoundError,
    PortTakenError,
    SchemeMismatchError,
)
from kvferry.proto.messages import InstanceInfo

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

ray_api: Any = ray  # parts of Ray's interface are not typed
IDENTITY = make_identity(num_layers=2, num_kv_heads=3)
HASH_BLOCK_TOKENS = 8
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray cluster for the file; authentication is set, not left to the machine's history."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with ray_cluster.connected("local", num_ranks=1, namespace=naming.SERVICES_NAMESPACE):
            yield


@pytest.fixture(scope="module")
def config() -> UpConfig:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return UpConfig(
        store_bytes=NUM_BLOCKS * IDENTITY.block_bytes(HASH_BLOCK_TOKENS),
        name="one",
        hash_block_tokens=HASH_BLOCK_TOKENS,
        port=port,
    )


@pytest.fixture(scope="module")
def places(cluster: None, config: UpConfig) -> ServicePlaces:
    """The service that runs until the last test."""
    return ray_services.up(config, print)


def attach(address: str) -> AttachedStore:
    with closing(NodeClient(address)) as client:
        return client.attach(IDENTITY, timeout_s=10.0)


def instances(address: str) -> list[InstanceInfo]:
    with connect(address) as ferry:
        return [status.info for status in ferry.describe().instances]


def status(capsys: pytest.CaptureFixture[str], address: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "--address", address, "--json"])
    assert ended.value.code == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_an_engine_outside_stores_and_fetches_through_its_hosts_node(
    places: ServicePlaces, config: UpConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (node,) = places.nodes
    host = ray_cluster.node_host()
    assert (places.name, places.was_running) == ("one", False)
    assert (node.host, node.address) == (host, f"127.0.0.1:{config.port}")
    store = attach(node.address)
    assert store.instance_id == f"store-{host}-{IDENTITY.digest().hex()[:8]}"
    stored = [torch.rand(2, 20, 3, 8) for _ in range(2)]
    into = [torch.zeros_like(layer) for layer in stored]
    with connect(node.address) as ferry:
        assert ferry.model(IDENTITY).store(range(20), stored) == 16
        assert ferry.model(IDENTITY).fetch(range(20), into) == 16
    assert torch.equal(into[1][:, :16], stored[1][:, :16])

    shown = status(capsys, places.coordinator)
    assert shown["scheme"]["none_hash"] == config.scheme.none_hash.hex()
    assert [one["digest"] for one in shown["identities"]] == [IDENTITY.digest().hex()]
    (instance,) = shown["instances"]
    assert instance["id"] == store.instance_id
    assert instance["addresses"] == [store.transfer_address]
    assert (instance["cached_blocks"], instance["total_blocks"]) == (2, NUM_BLOCKS - 1)
    assert instance["fill"] == 2 / (NUM_BLOCKS - 1)


def test_a_service_is_found_by_its_name_on_this_host(places: ServicePlaces) -> None:
    (node,) = places.nodes
    assert ray_services.resolve_service("one") == ray_services.any_front("one") == node.address
    with pytest.raises(NotFoundError, match="service two has no node on this host"):
        ray_services.resolve_service("two")
    with pytest.raises(NotFoundError, match="no such service"):
        ray_services.any_front("two")


def test_starting_it_again_tells_where_it_runs_and_other_settings_are_refused(
    places: ServicePlaces, config: UpConfig
) -> None:
    assert ray_services.up(config, print) == replace(places, was_running=True)
    with pytest.raises(MismatchError, match="service one runs with other settings") as caught:
        ray_services.up(replace(config, max_models=9), print)
    assert (caught.value.given, caught.value.allowed) == ({"max_models": 9}, {"max_models": 4})
    with pytest.raises(SchemeMismatchError):
        ray_services.up(replace(config, hash_seed="7"), print)


@pytest.mark.long
def test_a_service_that_cannot_start_leaves_nothing(
    places: ServicePlaces, config: UpConfig
) -> None:
    before = sorted(ray_api.util.list_named_actors())
    with pytest.raises(PortTakenError):
        ray_services.up(replace(config, name="two"), print)
    wait_for_actors(before)
    assert len(instances(places.nodes[0].address)) == 1


@pytest.mark.long
def test_a_node_whose_process_is_killed_comes_back_empty_at_the_same_address(
    places: ServicePlaces,
) -> None:
    (node,) = places.nodes
    before = attach(node.address)
    (store,) = instances(node.address)
    os.kill(store.rank_pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(KvferryError):
            after = attach(node.address)
            if after.incarnation > before.incarnation:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [info.incarnation for info in instances(node.address)] == [after.incarnation]


def test_a_service_that_is_removed_leaves_no_actor_and_its_port_free(
    places: ServicePlaces, config: UpConfig
) -> None:
    """The last test that uses the service."""
    removed = ray_services.down("one")
    assert (removed.coordinator, removed.hosts) == (True, (places.nodes[0].host,))
    assert ray_api.util.list_named_actors() == []
    socket.create_server(("127.0.0.1", config.port)).close()
    assert ray_services.down("one").hosts == ()


def wait_for_actors(expected: list[str]) -> None:
    deadline = time.monotonic() + 10
    while (now := sorted(ray_api.util.list_named_actors())) != expected:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
