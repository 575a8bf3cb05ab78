"""`RayService` on a real Ray cluster: placement, names, seeds, refusals, deaths, what is left."""

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table
from tests.integration.ray_serving import describe, request, routing

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.client import connect
from kvferry.cluster.config import KvEventsConfig, ServiceConfig
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.ray_handles import get
from kvferry.cluster.ray_launcher import RayService
from kvferry.cluster.ray_ranks import spawn_rank
from kvferry.cluster.ray_record import RayRecord
from kvferry.cluster.record import LIFE
from kvferry.cluster.serving.rank_actor import RankActor
from kvferry.cluster.serving.router import Served
from kvferry.proto.errors import (
    ConfigError,
    IdentityMismatchError,
    MismatchError,
    ModelError,
    ResourcesError,
    SchemeMismatchError,
)
from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import Identity
from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Description, InstanceInfo, KvEventsPlace
from kvferry.worker.model.loading import inspect_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ray_api: Any = ray  # parts of Ray's interface are not typed
BLOCK_TOKENS = 16
SERVED_ON = ("prefill-0", "decode-0")
ROOTS = {seed: make_scheme(seed=seed, hash_block_tokens=BLOCK_TOKENS).none_hash for seed in "07"}
Start = Callable[..., RayService]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray cluster for the file; authentication is set, not left to the machine's history."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with ray_cluster.connected("local", num_ranks=5, namespace=naming.new_namespace()):
            yield


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> ServiceConfig:
    return ServiceConfig(
        model=str(tiny_model),
        num_decode=1,
        prefill_layout=Layout(block_tokens=BLOCK_TOKENS),
        decode_layout=Layout(block_tokens=BLOCK_TOKENS),
        kv_events=KvEventsConfig(),
        sample_block_every=1,
        metrics_port=0,
    )


@pytest.fixture(scope="module")
def identity(config: ServiceConfig) -> Identity:
    return inspect_model(config.model).identity


@pytest.fixture(scope="module")
def service(cluster: None, config: ServiceConfig, identity: Identity) -> Iterator[RayService]:
    """The service that goes on while others start, fail and are refused beside it."""
    with RayService(config, identity) as running:
        running.start(print)
        yield running


@pytest.fixture
def start(cluster: None, config: ServiceConfig, identity: Identity) -> Iterator[Start]:
    """Start a service of the test's own; it is closed in any case."""
    started: list[RayService] = []

    def start(**changes: Any) -> RayService:
        one = RayService(replace(config, **changes), identity)
        started.append(one)
        one.start(print)
        return one

    yield start
    for one in started:
        one.close()


def require_serves(service: RayService, name: str) -> None:
    """One request of 40 prompt tokens, from prefill to decode."""

    async def once() -> Served:
        async with routing(service) as router:
            return await router.serve(request(name, 3))

    served = asyncio.run(once())
    assert (served.prefill_instance, served.decode_instance) == SERVED_ON
    assert len(served.output_token_ids) == 3
    parts = served.accounting
    assert parts.local_hit_tokens == 0, "another service's blocks, or another test's"
    assert parts.remote_hit_tokens + parts.computed_tokens == parts.prompt_tokens == 40


def members(description: Description) -> dict[str, KvEventsPlace | None]:
    """Who has told everything, and where the KV events of each are."""
    return {i.info.instance_id: i.kv_events for i in description.instances if i.state == "live"}


def held() -> tuple[list[str], int, dict[str, float]]:
    """Names of living actors, number of groups that hold something, and free resources."""
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    free = {k: v for k, v in ray_api.available_resources().items() if k in ("CPU", "GPU")}
    return sorted(ray_api.util.list_named_actors()), len(groups), free


def wait_until_held(expected: tuple[list[str], int, dict[str, float]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (now := held()) != expected:
        assert time.monotonic() < deadline, (now, expected)
        time.sleep(0.05)


def join_by_hand(service: RayService, *, hash_seed: str = "0", **changes: Any) -> None:
    """Let one more rank join, with settings that the launcher would not give it."""
    settings = replace(service._rank_settings("decode", InstanceId("decode-9")), **changes)
    environment = {"env_vars": service._environment(1)["env_vars"] | {"PYTHONHASHSEED": hash_seed}}
    rank = ray_api.remote(num_cpus=0)(RankActor).options(runtime_env=environment)
    actor = rank.remote(settings, ray_cluster.node_host, spawn_rank)
    try:
        coordinator = CoordinatorClient(service.control_address)
        get(actor.start.remote(coordinator), timeout_s=60, who="instance decode-9")
    finally:
        ray_api.kill(actor)


def test_what_instances_hold_and_did_is_read_through_the_client(service: RayService) -> None:
    require_serves(service, "told")
    with (
        connect(service.control_address) as ferry,
        closing(ferry.events(InstanceId("decode-0"))) as reader,
    ):
        deadline = time.monotonic() + 20
        while len(reader.held) < 2:  # of 40 tokens in blocks of 16
            assert time.monotonic() < deadline
            reader.poll(0.1)
        stats = {i.info.instance_id: i.stats for i in ferry.describe().instances}
    decode = stats[InstanceId("decode-0")]
    assert decode.first.remote_hit >= 32
    assert decode.first.requests * 40 == decode.first.requested
    assert decode.residency is not None


def scrape(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        text: str = response.read().decode()
    return text


def test_metrics_of_all_processes_are_found_through_the_coordinators(service: RayService) -> None:
    require_serves(service, "counted")
    targets = json.loads(scrape(service.metrics_address, "/targets"))
    (coordinator, *ranks) = [(one["labels"], *one["targets"]) for one in targets]
    assert coordinator == ({"component": "coordinator"}, service.metrics_address)
    of_instance = {labels["instance_id"]: scrape(address) for labels, address in ranks}
    assert set(of_instance) == set(SERVED_ON)
    assert 'kvferry_block_lifetime_seconds_count{instance_id="decode-0",role="decode"}' in scrape(
        service.metrics_address
    )
    ended = r'kvferry_transfers_total{direction="%s",path="shm"} (.*)'
    found = [
        re.search(ended % direction, of_instance[instance_id])
        for instance_id, direction in (("prefill-0", "served"), ("decode-0", "pulled"))
    ]
    served, pulled = (float(match.group(1)) for match in found if match)
    assert min(served, pulled) > 0


# -- B57: what cannot be placed -------------------------------------------------------------------


def test_b57_a_gpu_the_cluster_lacks_is_refused_in_time_and_all_is_free_again(
    service: RayService, config: ServiceConfig, identity: Identity
) -> None:
    before = held()
    asked = time.monotonic()
    with (
        pytest.raises(
            ResourcesError, match=r"prefill-0 could not be placed .* \(INFEASIBLE\)"
        ) as caught,
        RayService(replace(config, device="cuda", start_timeout_s=5.0), identity) as lacking,
    ):
        lacking.start(print)
    assert time.monotonic() - asked < 8
    assert caught.value.given == {"ranks": 1, "each": "CPU 1, GPU 1"}
    assert caught.value.allowed == {"total": "CPU 5, GPU 0", "free": "CPU 3, GPU 0"}
    wait_until_held(before, timeout_s=10)


def test_b57_a_start_that_fails_in_the_ranks_tells_why_and_gives_everything_back(
    service: RayService, config: ServiceConfig, identity: Identity, tmp_path: Path
) -> None:
    before = held()
    missing = str(tmp_path / "no-such-model")
    with (
        pytest.raises(ModelError, match="no such model") as caught,
        RayService(config.with_model(missing), identity) as failing,
    ):
        failing.start(print)
    assert caught.value.given == missing
    wait_until_held(before, timeout_s=10)


def test_a_loopback_bind_is_refused_where_nodes_have_several_addresses(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held()
    assert ray_cluster.node_hosts() == {ray_cluster.node_host()}
    monkeypatch.setattr(ray_cluster, "node_hosts", lambda: frozenset({"10.0.0.1", "10.0.0.2"}))
    with pytest.raises(ConfigError, match="none but its own"):
        start()
    assert held() == before


# -- B58, B60: who may join -----------------------------------------------------------------------


def test_b58_the_hash_seed_reaches_every_rank(service: RayService) -> None:
    schemes = [instance.info.scheme for instance in describe(service).instances]
    assert schemes == [service.scheme, service.scheme]
    assert service.scheme.none_hash == ROOTS["0"] != ROOTS["7"]


def test_b58_a_rank_with_another_hash_seed_is_refused_showing_both_roots(
    service: RayService,
) -> None:
    with pytest.raises(SchemeMismatchError, match="decode-9") as caught:
        join_by_hand(service, hash_seed="7")
    assert caught.value.given == {"none_hash": ROOTS["7"].hex()}
    assert caught.value.allowed == {"none_hash": ROOTS["0"].hex()}
    require_serves(service, "after a refused seed")


XXHASH_ROOT = make_scheme(
    seed="0", hash_block_tokens=BLOCK_TOKENS, algorithm="xxhash_cbor"
).none_hash


@pytest.mark.parametrize(
    ("changes", "error", "given", "allowed"),
    [
        (
            {"dtype": "bfloat16"},
            IdentityMismatchError,
            {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16"},
            {"weight_dtype": "float32", "kv_dtype": "float32"},
        ),
        (
            {
                "hash_block_tokens": 2 * BLOCK_TOKENS,
                "layout": Layout(block_tokens=2 * BLOCK_TOKENS),
            },
            SchemeMismatchError,
            {"hash_block_tokens": 2 * BLOCK_TOKENS},
            {"hash_block_tokens": BLOCK_TOKENS},
        ),
        (
            {"algorithm": "xxhash_cbor"},
            SchemeMismatchError,
            {"algorithm": "xxhash_cbor", "none_hash": XXHASH_ROOT.hex()},
            {"algorithm": "sha256_cbor", "none_hash": ROOTS["0"].hex()},
        ),
    ],
    ids=["dtype", "hash_block_tokens", "algorithm"],
)
def test_b60_a_rank_that_differs_is_refused_naming_what_differs_and_no_more(
    service: RayService,
    changes: dict[str, Any],
    error: type[MismatchError],
    given: dict[str, Any],
    allowed: dict[str, Any],
) -> None:
    with pytest.raises(error, match="decode-9") as caught:
        join_by_hand(service, **changes)
    assert (caught.value.given, caught.value.allowed) == (given, allowed)
    assert {i.info.instance_id for i in describe(service).instances} == set(SERVED_ON)


# -- B56: several lives on one cluster ------------------------------------------------------------


def test_b56_two_services_do_not_meet_and_one_may_close_and_start_again_at_once(
    service: RayService, start: Start
) -> None:
    before = held()
    second = start(hash_seed="7")
    assert {i.info.scheme.none_hash for i in describe(second).instances} == {ROOTS["7"]}
    pids = [{i.info.rank_pids for i in describe(one).instances} for one in (service, second)]
    assert len(pids[0]) == len(pids[1]) == 2
    assert pids[0].isdisjoint(pids[1])
    for one in (service, second):
        require_serves(one, "the same prompt on both")
    second.close()
    second.close()
    # One of its instances has two ranks, and no actor but its own may hold them.
    third = start(hash_seed="7", decode_layout=Layout(block_tokens=BLOCK_TOKENS // 2, dcp=2))
    assert [len(one.info.rank_pids) for one in third.instances] == [1, 2]
    require_serves(third, "after a start at once")
    require_serves(service, "beside a service that was closed")
    third.close()
    wait_until_held(before, timeout_s=10)


# -- deaths ---------------------------------------------------------------------------------------


def test_an_instance_that_is_killed_is_started_again_and_serves(
    service: RayService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode() -> InstanceInfo:
        return service.instances[1].info

    async def serve() -> Served:
        async with routing(service) as router:
            await router.serve(request("before a death", 3))
            before = decode()
            with monkeypatch.context() as patch:
                # The coordinator may have moved since the service began.
                patch.setattr(service, "control_address", "127.0.0.1:1")
                os.kill(before.rank_pids[0], signal.SIGKILL)
                async with asyncio.timeout(60.0):
                    while decode() == before or not router.is_alive(before.instance_id):
                        await asyncio.sleep(0.05)
            return await router.serve(request("after a death", 3))

    served = asyncio.run(serve())
    assert (served.prefill_instance, served.decode_instance) == SERVED_ON
    assert sorted(members(describe(service))) == sorted(SERVED_ON)


def test_a_coordinator_that_is_killed_comes_back_at_its_addresses_while_requests_go_on(
    service: RayService,
) -> None:
    """The last test that uses the service."""
    actor: Any = service._coordinator
    pid = get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout_s=10, who="it")
    before = describe(service)

    async def serve(name: str, kill: bool) -> Served:
        asked = replace(request("through a death", 100), request_id=RequestId(name))
        async with routing(service) as router:
            async for event in router.stream(asked):
                if isinstance(event, Served):
                    return event
                if kill:
                    os.kill(pid, signal.SIGKILL)
                kill = False
        raise AssertionError("a stream ends with its summary")

    undisturbed = asyncio.run(serve("undisturbed", kill=False))
    cut_off = asyncio.run(serve("cut off", kill=True))
    assert cut_off.output_token_ids == undisturbed.output_token_ids
    assert describe(service).epoch == before.epoch + 1
    assert "kvferry_coordinator_epoch" in scrape(service.metrics_address)
    deadline = time.monotonic() + 10
    while members(describe(service)) != members(before):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    closing = time.monotonic()
    service.close()
    assert time.monotonic() - closing < 5
    wait_until_held(([], 0, {"CPU": 5.0}), timeout_s=10)
    assert RayRecord(service._service_id).read(LIFE) == {}
