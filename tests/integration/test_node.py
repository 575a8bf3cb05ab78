"""A node before a real coordinator: its front passes everything on, and gives out stores."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.certificates import CertificateFolder
from tests.integration.node_service import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    ENGINE,
    IDENTITIES,
    NODE,
    NUM_BLOCKS,
    node_config,
    serving,
)

from kvferry.cluster.client import connect
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_client import NodeClient
from kvferry.cluster.node_config import NodeConfig
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    CredentialsError,
    InsecureBindError,
    NotFoundError,
    NotRegisteredError,
    PortTakenError,
    ResourcesError,
    UnavailableError,
)
from kvferry.proto.ids import Epoch, InstanceId, LeaseId
from kvferry.proto.messages import (
    Command,
    Describe,
    Description,
    InstanceStatus,
    RegisterInstance,
    RenewLease,
    Reply,
    Reserve,
)
from kvferry.proto.v1 import control_pb2

Raw = Callable[..., bytes]


@pytest.fixture
def coordinator() -> Iterator[CoordinatorActor]:
    with serving(None) as actor:
        yield actor


@pytest.fixture
def config(coordinator: CoordinatorActor) -> NodeConfig:
    return node_config(coordinator)


@pytest.fixture
def node(config: NodeConfig) -> Iterator[StoreNode]:
    one = StoreNode(config)
    yield one
    one.stop()


@pytest.fixture
def address(node: StoreNode) -> str:
    return node.start()


@pytest.fixture
def client(address: str) -> Iterator[NodeClient]:
    with closing(NodeClient(address)) as one:
        yield one


def instances(coordinator: CoordinatorActor) -> tuple[InstanceStatus, ...]:
    description = coordinator.call(Describe())
    assert isinstance(description, Description)
    return description.instances


def test_an_engine_that_knows_only_its_node_attaches_stores_and_fetches(
    address: str, client: NodeClient
) -> None:
    store = client.attach(IDENTITIES[0], timeout_s=10.0)
    assert store.instance_id == NODE + IDENTITIES[0].digest().hex()[:8]
    assert (store.num_blocks, store.hash_block_tokens) == (NUM_BLOCKS, BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(1)
    stored = [torch.randn(2, 10, 3, 8, generator=generator) for _ in range(2)]
    into = [torch.zeros_like(layer) for layer in stored]
    with connect(address) as ferry:
        assert ferry.identities() == (IDENTITIES[0],)
        cache = ferry.model(IDENTITIES[0])
        assert cache.store(range(10), stored) == 8
        hit = cache.lookup(range(10))
        assert hit.source is not None
        assert hit.source.rank_addresses == (store.transfer_address,)
        assert hit.source.incarnation == store.incarnation
        assert cache.fetch(range(10), into) == 8
    for got, wanted in zip(into, stored, strict=True):
        assert torch.equal(got[:, :8], wanted[:, :8])


def test_attaching_again_gives_the_same_store_and_another_identity_its_own(
    coordinator: CoordinatorActor, client: NodeClient
) -> None:
    first, again, second = (
        client.attach(IDENTITIES[number], timeout_s=10.0) for number in (0, 0, 1)
    )
    assert first == again
    assert second.transfer_address != first.transfer_address
    assert [status.info.identity for status in instances(coordinator)] == IDENTITIES[:2]
    assert {status.info.role for status in instances(coordinator)} == {"store"}


def test_engines_that_attach_at_the_same_moment_get_one_store(
    coordinator: CoordinatorActor, client: NodeClient
) -> None:
    together = threading.Barrier(4)

    def attach(_: int) -> object:
        together.wait(10.0)
        return client.attach(IDENTITIES[0], timeout_s=10.0)

    with ThreadPoolExecutor(4) as threads:
        stores = set(threads.map(attach, range(4)))
    assert len(stores) == len(instances(coordinator)) == 1


def test_more_identities_than_allowed_are_refused_with_those_that_are_attached(
    client: NodeClient,
) -> None:
    attached = [client.attach(identity, timeout_s=10.0) for identity in IDENTITIES[:2]]
    with pytest.raises(ResourcesError, match="as many stores as it may have") as caught:
        client.attach(IDENTITIES[2], timeout_s=10.0)
    assert caught.value.given == [
        f"{store.instance_id} (tiny v{number})" for number, store in enumerate(attached)
    ]
    assert caught.value.allowed == "2 identities (--max-models)"
    assert client.attach(IDENTITIES[1], timeout_s=10.0) == attached[1]


def test_an_identity_whose_blocks_are_too_large_for_the_store_is_refused_with_both_sizes(
    coordinator: CoordinatorActor, client: NodeClient
) -> None:
    wide = replace(IDENTITIES[0], head_size=8 * 8)
    with pytest.raises(ResourcesError, match="no room for 8 blocks of tiny") as caught:
        client.attach(wide, timeout_s=10.0)
    assert caught.value.given == {
        "store_bytes": NUM_BLOCKS * BLOCK_BYTES + BLOCK_BYTES // 2,
        "block_bytes": 8 * BLOCK_BYTES,
    }
    assert caught.value.allowed == f"store_bytes >= {64 * BLOCK_BYTES} (--store-gib)"
    assert instances(coordinator) == ()


def test_what_the_coordinator_refuses_is_refused_by_the_node_in_the_same_words(
    config: NodeConfig, address: str
) -> None:
    refusals = []
    for place in (config.coordinator, address):
        with closing(ControlClient(place, timeout_s=5.0)) as client:
            with pytest.raises(NotFoundError) as caught:
                client.call(RenewLease(call_id="1", lease_id=LeaseId("none"), ttl_s=1.0))
            refusals.append(caught.value.to_json())
        with (
            closing(CoordinatorClient(place)) as engine,
            pytest.raises(NotRegisteredError) as refused,
        ):
            engine.call(
                Reserve(
                    call_id="2",
                    epoch=Epoch(1),
                    instance_id=InstanceId("nobody"),
                    incarnation=1,  # type: ignore[arg-type]
                    hashes=(),
                ),
                timeout_s=5.0,
            )
        refusals.append(refused.value.to_json())
    assert refusals[:2] == refusals[2:]


def test_a_call_without_a_deadline_or_of_an_unknown_method_is_refused(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        describe: Raw = channel.unary_unary("/kvferry.control.v1.Control/Describe")
        levitate: Raw = channel.unary_unary("/kvferry.control.v1.Control/Levitate")
        with pytest.raises(grpc.RpcError) as caught:
            describe(b"")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        reply = control_pb2.DescribeReply.FromString(describe(b"", timeout=5.0))
        assert reply.scheme.hash_block_tokens == BLOCK_TOKENS
        with pytest.raises(grpc.RpcError) as caught:
            levitate(b"", timeout=5.0)
        assert "Method not found" in str(caught.value.details())
        stub: Any = health_pb2_grpc.HealthStub(channel)
        checked = stub.Check(
            health_pb2.HealthCheckRequest(service="kvferry.node.v1.Node"), timeout=5.0
        )
        assert checked.status == health_pb2.HealthCheckResponse.SERVING


def test_what_is_no_identity_is_refused(address: str, coordinator: CoordinatorActor) -> None:
    with grpc.insecure_channel(address) as channel:
        attach: Raw = channel.unary_unary("/kvferry.node.v1.Node/Attach")
        for request in (b"", b"\xff", b"\x0a\x01\xff"):
            with pytest.raises(grpc.RpcError) as caught:
                attach(request, timeout=5.0)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert instances(coordinator) == ()


def test_a_stopped_node_has_left_the_service(
    coordinator: CoordinatorActor, node: StoreNode, client: NodeClient
) -> None:
    store = client.attach(IDENTITIES[0], timeout_s=10.0)
    node.stop()
    node.stop()
    assert instances(coordinator) == ()
    with pytest.raises(UnavailableError):
        client.attach(IDENTITIES[0], timeout_s=5.0)
    host, _, port = store.transfer_address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5.0)


def test_a_node_that_starts_anew_removes_the_stores_of_its_earlier_life(
    coordinator: CoordinatorActor, config: NodeConfig, client: NodeClient
) -> None:
    client.attach(IDENTITIES[0], timeout_s=10.0)
    neighbour = StoreNode(replace(config, host="127.0.0.1-2"))
    after = StoreNode(config)
    try:
        neighbour.start()
        neighbour.attach(IDENTITIES[0], 10.0)
        with closing(NodeClient(after.start())) as engine:
            (left,) = instances(coordinator)
            assert left.info.instance_id.startswith("store-127.0.0.1-2-")
            store = engine.attach(IDENTITIES[0], timeout_s=10.0)
        lives = {one.info.instance_id: one.info.incarnation for one in instances(coordinator)}
        assert lives[store.instance_id] == store.incarnation
    finally:
        neighbour.stop()
        after.stop()


def test_without_a_coordinator_calls_end_with_an_error_that_names_it(
    coordinator: CoordinatorActor, config: NodeConfig, address: str, client: NodeClient
) -> None:
    client.attach(IDENTITIES[0], timeout_s=10.0)
    coordinator.stop()
    with closing(ControlClient(address, timeout_s=5.0)) as control:
        with pytest.raises(UnavailableError, match="the coordinator does not answer") as caught:
            control.call(Describe())
        assert caught.value.given == config.coordinator
    with pytest.raises(UnavailableError, match=config.coordinator):
        client.attach(IDENTITIES[1], timeout_s=5.0)
    with pytest.raises(UnavailableError, match=config.coordinator):
        StoreNode(config).start()


def test_an_engine_that_attaches_again_is_listed_once_with_its_last_identity(
    client: NodeClient,
) -> None:
    for identity in IDENTITIES[:2]:
        client.attach(identity, timeout_s=10.0, engine=ENGINE)
    (one,) = client.engines(timeout_s=10.0)
    assert (one.engine, one.identity_digest) == (ENGINE, IDENTITIES[1].digest())


def test_a_taken_port_is_refused(config: NodeConfig, address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(PortTakenError):
        StoreNode(replace(config, port=port)).start()


def test_a_node_with_credentials_lets_nobody_in_without(tmp_path: Path) -> None:
    files = CertificateFolder(tmp_path)
    credentials = files.mutual(token_file=files.token_file())
    with serving(credentials) as coordinator:
        node = StoreNode(
            NodeConfig(
                host="127.0.0.1",
                coordinator=str(coordinator.front_address()),
                store_bytes=NUM_BLOCKS * BLOCK_BYTES,
                port=0,
                credentials=credentials,
            )
        )
        address = node.start()
        with closing(NodeClient(address, credentials)) as ours:
            ours.attach(IDENTITIES[0], timeout_s=10.0)
        with connect(address, credentials=credentials) as ferry:
            assert ferry.identities() == (IDENTITIES[0],)
        with closing(NodeClient(address)) as theirs, pytest.raises(CredentialsError):
            theirs.attach(IDENTITIES[0], timeout_s=10.0)
        node.stop()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"store_bytes": 0}, ConfigError),
        ({"max_models": 0}, ConfigError),
        ({"port": 65536}, ConfigError),
        ({"bind": "0.0.0.0"}, InsecureBindError),
    ],
)
def test_settings_that_cannot_be_are_refused(
    config: NodeConfig, changes: dict[str, object], error: type[BadInputError]
) -> None:
    with pytest.raises(error):
        replace(config, **changes)  # type: ignore[arg-type]


def test_a_store_that_is_made_while_its_node_stops_is_not_left_in_the_service(
    node: StoreNode,
    address: str,
    coordinator: CoordinatorActor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register = node._coordinator.call

    def call_and_stop(command: Command, *, timeout_s: float) -> Reply:
        reply = register(command, timeout_s=timeout_s)
        if isinstance(command, RegisterInstance):
            node._watch = None  # as `stop` does, before it waits for the store that is being made
        return reply

    watch = node._watch
    assert watch is not None
    monkeypatch.setattr(node._coordinator, "call", call_and_stop)
    with pytest.raises(UnavailableError, match="does not serve any more"):
        node.attach(IDENTITIES[0], 5.0)
    watch.stop()
    described = coordinator.call(Describe())
    assert isinstance(described, Description)
    assert described.instances == ()
