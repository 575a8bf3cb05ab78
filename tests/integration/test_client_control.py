"""The control front and its client, with a coordinator that is one function."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cluster.client import connect
from kvferry.cluster.control_client import ControlClient
from kvferry.coordinator.control_server import SERVICE_NAME, ControlServer
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    DeadlineError,
    IdentityMismatchError,
    InsecureBindError,
    InvariantError,
    KvferryError,
    NotFoundError,
    PortTakenError,
    UnavailableError,
)
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import MAX_HASHES, BlockHash, Epoch, LeaseId
from kvferry.proto.messages import (
    AcquireLease,
    Command,
    Describe,
    Description,
    Done,
    Forgotten,
    Leased,
    Locate,
    Located,
    ReleaseLease,
    RenewLease,
    Reply,
    ResetIdentity,
    Tick,
)
from kvferry.proto.v1 import control_pb2 as pb

DIGEST = bytes(32)
HASHES = (BlockHash(b"a" * 32), BlockHash(b"b" * 32))
DESCRIPTION = Description(
    epoch=Epoch(3),
    scheme=make_scheme(hash_block_tokens=16),
    instances=(),
    num_leases=1,
    num_handoffs=2,
)

Serve = Callable[[Callable[[Command], Reply]], ControlClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a front for a coordinator, and a client to it."""
    opened: list[ControlServer | ControlClient] = []

    def start(call: Callable[[Command], Reply]) -> ControlClient:
        server = ControlServer(call, bind="127.0.0.1", port=0, insecure=False)
        client = ControlClient(server.address, timeout_s=5.0)
        opened.extend([server, client])
        return client

    yield start
    for one in reversed(opened):
        if isinstance(one, ControlServer):
            one.stop()
        else:
            one.close()


def refusing(error: Exception) -> Callable[[Command], Reply]:
    def call(command: Command) -> Reply:
        raise error

    return call


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        (Describe(), DESCRIPTION),
        (Locate(identity_digest=DIGEST, hashes=HASHES), Located(epoch=Epoch(3), holders=())),
        (
            AcquireLease(call_id="c", identity_digest=DIGEST, hashes=HASHES, ttl_s=1.5),
            Leased(lease_id=LeaseId("l"), source=None, num_hashes=2, ttl_s=1.5),
        ),
        (
            RenewLease(call_id="c", lease_id=LeaseId("l"), ttl_s=2.5),
            Leased(lease_id=LeaseId("l"), source=None, num_hashes=2, ttl_s=2.5),
        ),
        (ReleaseLease(call_id="c", lease_id=LeaseId("l")), Done(changed=True)),
        (ResetIdentity(call_id="c", identity_digest=DIGEST), Forgotten(num_blocks=7)),
    ],
)
def test_each_command_arrives_as_it_was_and_so_does_its_reply(
    serve: Serve, command: Command, reply: Reply
) -> None:
    arrived: list[Command] = []

    def call(given: Command) -> Reply:
        arrived.append(given)
        return reply

    assert serve(call).call(command) == reply
    if isinstance(command, AcquireLease | RenewLease | ReleaseLease | ResetIdentity):
        # An outsider's ids are marked, so that they never meet an engine's or the router's.
        command = replace(command, call_id=f"client/{command.call_id}")
    assert arrived == [command]


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("unknown lease", given="l-1", allowed=["l-2"]),
        IdentityMismatchError("differs", given={"model": "a"}, allowed={"model": "b"}),
        UnavailableError("stopping"),
    ],
)
def test_a_refusal_arrives_as_the_same_error_with_its_values(
    serve: Serve, error: KvferryError
) -> None:
    with pytest.raises(type(error)) as caught:
        serve(refusing(error)).call(Describe())

    assert caught.type is type(error)
    assert caught.value.to_json() == error.to_json()


def test_a_bug_in_the_coordinator_reaches_the_client_at_once(serve: Serve) -> None:
    started = time.monotonic()
    with pytest.raises(InvariantError, match="the coordinator failed; given: KeyError: 'gone'"):
        serve(refusing(KeyError("gone"))).call(Describe())
    with pytest.raises(InvariantError, match="given: Done; allowed: Description"):
        serve(lambda _: Done(changed=False)).call(Describe())

    assert time.monotonic() - started < 4.0


def test_a_malformed_request_never_reaches_the_coordinator(serve: Serve) -> None:
    client = serve(refusing(AssertionError("reached")))

    with pytest.raises(BadInputError, match="identity_digest has the wrong size; given: 3"):
        client.call(Locate(identity_digest=b"abc", hashes=HASHES))
    with pytest.raises(BadInputError, match=r"given: Tick; allowed: \['Describe'"):
        client.call(Tick())
    with pytest.raises(BadInputError, match="of a wrong kind"):
        client.call(RenewLease(call_id="c", lease_id=LeaseId("l"), ttl_s="soon"))  # type: ignore[arg-type]


def test_an_address_nobody_listens_on_is_unavailable_within_the_timeout() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=address):
            connect(address, timeout_s=3.0)

    assert time.monotonic() - started < 3.5


def test_a_listener_that_says_nothing_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=address):
            connect(address, timeout_s=0.5)

    assert time.monotonic() - started < 2.0


def test_a_coordinator_that_hangs_ends_at_the_calls_own_deadline(serve: Serve) -> None:
    release = threading.Event()

    def call(_: Command) -> Reply:
        release.wait(10.0)
        return DESCRIPTION

    client = serve(call)
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        client.call(Describe(), timeout_s=0.3)
    assert time.monotonic() - started < 2.0
    release.set()


NO_ADDRESSES = ["", "localhost", "localhost:", ":7000", "http://a:1", "::1:7", "a:0", "a:99999"]


@pytest.mark.parametrize("address", [*NO_ADDRESSES, "a:1\n", None, 7000, b"a:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a control front") as caught:
        connect(address)
    assert caught.value.given == repr(address)
    assert caught.value.allowed == "host:port, the port from 1 to 65535"


@pytest.mark.parametrize(
    "timeout_s", [0.0, -1.0, float("inf"), float("nan"), 301, 10**400, None, "1", True, 1j]
)
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout must be positive") as caught:
        connect("127.0.0.1:1", timeout_s=timeout_s)
    assert caught.value.given == repr(timeout_s)
    assert caught.value.allowed == "seconds, above 0 and up to 300.0"


def test_more_hashes_than_one_call_may_have_are_refused_on_both_sides(serve: Serve) -> None:
    client = serve(lambda _: Located(epoch=Epoch(3), holders=()))
    most = (BlockHash(b"h" * 16),) * MAX_HASHES
    assert client.call(Locate(identity_digest=DIGEST, hashes=most))
    with pytest.raises(BadInputError, match="given: 262145; allowed: at most 262144"):
        client.call(Locate(identity_digest=DIGEST, hashes=(*most, most[0])))

    hashes = pb.Hashes(data=b"h" * 16 * (MAX_HASHES + 1), hash_bytes=16)
    request = pb.LocateRequest(identity_digest=DIGEST, hashes=hashes).SerializeToString()
    with pytest.raises(grpc.RpcError, match="too many hashes in one call; given: 262145") as caught:
        call_raw(client.address, "Locate", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def call_raw(address: str, method: str, request: bytes, timeout_s: float | None = 5.0) -> bytes:
    with grpc.insecure_channel(address) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        call = channel.unary_unary(f"/{SERVICE_NAME}/{method}")
        return call(request, timeout=timeout_s)


@pytest.mark.parametrize(
    "method", ["Describe", "Locate", "AcquireLease", "RenewLease", "ReleaseLease", "Reset"]
)
def test_bytes_that_are_no_message_are_the_callers_fault(
    serve: Serve, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(refusing(AssertionError("reached")))
    with pytest.raises(grpc.RpcError, match=f"not a {method}Request; given: 2 bytes") as caught:
        call_raw(client.address, method, b"\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.records == []


@pytest.mark.parametrize("timeout_s", [None, 30 * 86_400.0])
def test_a_call_that_could_hold_a_thread_for_weeks_is_refused(
    serve: Serve, timeout_s: float | None
) -> None:
    client = serve(lambda _: DESCRIPTION)
    with pytest.raises(grpc.RpcError, match=r"deadline.*; allowed: up to 300.0 s") as caught:
        call_raw(client.address, "Describe", b"", timeout_s)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert call_raw(client.address, "Describe", b"", 300.0)


def test_a_closed_client_says_so(serve: Serve) -> None:
    client = serve(lambda _: DESCRIPTION)
    client.close()
    client.close()

    with pytest.raises(UnavailableError, match="this client is closed"):
        client.call(Describe())


def test_many_callers_are_all_answered(serve: Serve) -> None:
    client = serve(lambda _: DESCRIPTION)
    with ThreadPoolExecutor(32) as threads:
        replies = list(threads.map(lambda _: client.call(Describe()), range(100)))

    assert replies == [DESCRIPTION] * 100


def test_a_taken_port_an_open_bind_and_a_wrong_port_are_refused() -> None:
    def listen(bind: str, port: int) -> ControlServer:
        return ControlServer(lambda _: DESCRIPTION, bind=bind, port=port, insecure=False)

    first = listen("127.0.0.1", 0)
    try:
        with pytest.raises(PortTakenError, match=f"given: {first.address}"):
            listen("127.0.0.1", int(first.address.rpartition(":")[2]))
        with pytest.raises(InsecureBindError, match=r"given: 0\.0\.0\.0"):
            listen("0.0.0.0", 0)
        with pytest.raises(ConfigError, match="port out of range; given: 65536"):
            listen("127.0.0.1", 65536)
    finally:
        first.stop()


def test_health_is_served_until_the_front_stops() -> None:
    server = ControlServer(lambda _: DESCRIPTION, bind="127.0.0.1", port=0, insecure=False)
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        check = stub.Check
        for name in ("", SERVICE_NAME):
            request = health_pb2.HealthCheckRequest(service=name)
            assert check(request, timeout=5.0).status == health_pb2.HealthCheckResponse.SERVING
        server.stop()
        server.stop()
        with pytest.raises(grpc.RpcError) as caught:
            check(request, timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
