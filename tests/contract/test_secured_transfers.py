"""Whom a worker's front lets in, whom its client trusts, and what both sides are told otherwise."""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.certificates import TOKEN, CertificateFolder
from tests.integration.transfer_peer import content_of, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import ConfigError, CredentialsError, MessageTooLargeError
from kvferry.proto.grpc_channel import open_channel
from kvferry.proto.grpc_front import HEALTH_CHECK
from kvferry.proto.grpc_options import MAX_MESSAGE_BYTES, SERVER_SLACK_BYTES
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation
from kvferry.worker.block_io import gather
from kvferry.worker.frames import Place
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.pull import BlockRun
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_client import STORE_METHOD, TransferClient
from kvferry.worker.transfer_server import SERVICE_NAME

TIMEOUT_S = 5.0


@pytest.fixture
def files(tmp_path: Path) -> CertificateFolder:
    return CertificateFolder(tmp_path / "ours")


@pytest.fixture
def strangers(tmp_path: Path) -> CertificateFolder:
    """Another authority, unknown to ours."""
    return CertificateFolder(tmp_path / "theirs")


class Peers:
    """Workers with credentials of their own, stopped at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def worker(self, credentials: Credentials | None) -> WorkerService:
        plain = new_worker(50, num_blocks=9, num_layers=2, head_size=64)
        worker = WorkerService(
            incarnation=Incarnation(50), memory=plain.memory, credentials=credentials
        )
        self._stack.callback(worker.stop)
        return worker

    def serving(self, credentials: Credentials | None, **changes: Any) -> str:
        return self.worker(credentials).serve(**changes)

    def client(self, credentials: Credentials | None) -> TransferClient:
        return self._stack.enter_context(closing(TransferClient(credentials)))

    def channel(self, address: str, credentials: Credentials | None) -> grpc.Channel:
        return self._stack.enter_context(open_channel(address, credentials))


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


def refusal(client: TransferClient, address: str) -> CredentialsError:
    with pytest.raises(CredentialsError) as caught:
        client.describe(address, timeout_s=TIMEOUT_S)
    return caught.value


def test_two_workers_that_prove_who_they_are_exchange_equal_bytes(
    files: CertificateFolder, peers: Peers
) -> None:
    credentials = files.mutual(token_file=files.token_file())
    source, taker = peers.worker(credentials), peers.worker(credentials)
    fill(source)
    block_ids = [BlockId(i) for i in (8, 3, 5, 1)]
    run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(i) for i in range(4)], block_ids=block_ids)
    outcome = pull_blocks(taker, source.serve(), [run], incarnation=50)
    assert (outcome.num_blocks_of_run, outcome.error) == ((4,), None)
    (group,) = taker.memory.groups
    for index, block_id in enumerate(block_ids):
        arrived = gather(group, [Place(block_id, 0, group.geometry.num_layers)])
        assert bytes(arrived) == content_of(index, group.geometry.block_bytes)


def test_a_client_without_a_certificate_is_refused_by_a_server_that_asks(
    files: CertificateFolder, peers: Peers
) -> None:
    error = refusal(peers.client(files.trusting()), peers.serving(files.mutual()))
    assert "ended the connection when it had seen this client's certificate" in error.message
    assert error.given == "no certificate"


def test_a_client_of_another_authority_is_refused(
    files: CertificateFolder, strangers: CertificateFolder, peers: Peers
) -> None:
    certificate, key = strangers.issue()
    client = peers.client(files.mutual(certificate=certificate, key=key))
    error = refusal(client, peers.serving(files.mutual()))
    assert error.given == str(certificate)
    assert error.allowed == "a certificate of an authority that the server trusts"


def test_a_server_of_another_authority_is_refused(
    files: CertificateFolder, strangers: CertificateFolder, peers: Peers
) -> None:
    error = refusal(peers.client(files.mutual()), peers.serving(strangers.mutual()))
    assert re.search("certificate of the server at .* is wrong: .*local issuer", error.message)
    assert error.given == {"ca": str(files.ca), "server_name": "kvferry"}


def test_a_server_of_another_name_is_refused(files: CertificateFolder, peers: Peers) -> None:
    error = refusal(peers.client(files.mutual()), peers.serving(files.mutual("other")))
    assert "Hostname mismatch, certificate is not valid for 'kvferry'" in error.message
    named = files.mutual("other", server_name="other")
    peers.client(named).describe(peers.serving(named), timeout_s=TIMEOUT_S)


def test_a_server_whose_certificate_has_expired_is_refused(
    files: CertificateFolder, peers: Peers
) -> None:
    address = peers.serving(files.mutual())
    files.issue(days=-1)
    error = refusal(peers.client(files.trusting()), address)
    assert "certificate has expired" in error.message


def test_plaintext_against_tls_and_tls_against_plaintext_are_told_apart(
    files: CertificateFolder, peers: Peers
) -> None:
    plain, secure = peers.serving(None), peers.serving(files.mutual())
    assert refusal(peers.client(None), secure).message == (
        f"the server at {secure} speaks TLS and this client plaintext"
    )
    assert refusal(peers.client(files.mutual()), plain).message == (
        f"the server at {plain} does not speak TLS and this client does"
    )


def test_a_pull_that_is_refused_tells_why_in_its_outcome(
    files: CertificateFolder, peers: Peers
) -> None:
    run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(0)], block_ids=[BlockId(1)])
    outcome = pull_blocks(peers.worker(None), peers.serving(files.mutual()), [run])
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "CredentialsError")
    assert outcome.error is not None
    assert "speaks TLS" in outcome.error


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "the call has no token; given: none"),
        ("wrong", "the call has another token than this service; given: another one"),
    ],
)
def test_a_call_without_the_token_is_refused_on_both_sides(
    files: CertificateFolder,
    peers: Peers,
    caplog: pytest.LogCaptureFixture,
    token: str | None,
    message: str,
) -> None:
    address = peers.serving(files.mutual(token_file=files.token_file()))
    theirs = None
    if token is not None:
        theirs = files.folder / "theirs"
        theirs.write_text(token)
    error = refusal(peers.client(files.mutual(token_file=theirs)), address)
    assert str(error).startswith(message)
    (line,) = [one.getMessage() for one in caplog.records]
    assert re.fullmatch(rf"refused a call of ipv4:127\.0\.0\.1:\d+: {message}.*", line)
    assert TOKEN not in line


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_the_token_is_asked_for_whatever_the_kind_of_call(
    files: CertificateFolder, peers: Peers, kind: str
) -> None:
    address = peers.serving(files.mutual(token_file=files.token_file()), reflection=True)
    method = {
        "unary_unary": f"/{SERVICE_NAME}/Describe",
        "unary_stream": f"/{SERVICE_NAME}/Fetch",
        "stream_unary": STORE_METHOD,
        "stream_stream": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }[kind]
    call: Any = getattr(peers.channel(address, files.mutual()), kind)(method)
    request: Any = b"" if kind.startswith("unary") else iter([b""])
    with pytest.raises(grpc.RpcError) as refused:
        list(call(request, timeout=TIMEOUT_S))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert type(error_of_call(refused.value, address)) is CredentialsError


def test_a_probe_needs_no_token_but_a_connection(files: CertificateFolder, peers: Peers) -> None:
    address = peers.serving(files.mutual(token_file=files.token_file()))
    channel = peers.channel(address, files.mutual())
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    reply = stub.Check(request, timeout=TIMEOUT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Watch(request, timeout=TIMEOUT_S))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert HEALTH_CHECK.endswith("/Check")


def test_a_server_takes_new_certificates_and_authorities_while_it_serves(
    files: CertificateFolder,
    strangers: CertificateFolder,
    peers: Peers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvferry.proto.grpc_front")
    credentials = files.mutual()
    address, early = peers.serving(credentials), peers.client(credentials)
    early.describe(address, timeout_s=TIMEOUT_S)
    files.become(strangers)
    # What is open stays open; whoever comes now needs the new authority, and finds it.
    early.describe(address, timeout_s=TIMEOUT_S)
    peers.client(credentials).describe(address, timeout_s=TIMEOUT_S)
    assert caplog.messages == [f"the server took a new certificate from {credentials.certificate}"]


def test_a_client_whose_certificate_was_replaced_shows_the_new_one_at_its_next_call(
    files: CertificateFolder, strangers: CertificateFolder, peers: Peers
) -> None:
    credentials = files.mutual()
    client = peers.client(credentials)
    address = peers.serving(strangers.mutual())
    refusal(client, address)
    files.become(strangers)
    client.describe(address, timeout_s=TIMEOUT_S)


def test_a_server_keeps_its_certificate_while_the_new_one_does_not_fit_its_key(
    files: CertificateFolder, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = files.mutual()
    address = peers.serving(credentials)
    assert credentials.certificate is not None
    kept = credentials.certificate.read_bytes()
    client_credentials = files.mutual("client")
    other, _ = files.issue("other")
    credentials.certificate.write_bytes(other.read_bytes())
    peers.client(client_credentials).describe(address, timeout_s=TIMEOUT_S)
    assert caplog.messages[0].startswith("the server keeps its certificate, since the new one")
    credentials.certificate.write_bytes(kept)
    peers.client(client_credentials).describe(address, timeout_s=TIMEOUT_S)


def test_a_server_takes_a_new_token_while_it_serves(files: CertificateFolder, peers: Peers) -> None:
    credentials = files.mutual(token_file=files.token_file("first"))
    address, client = peers.serving(credentials), peers.client(credentials)
    client.describe(address, timeout_s=TIMEOUT_S)
    files.token_file("second")
    # The client hears it once, and reads the file anew.
    refusal(client, address)
    client.describe(address, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("num_bytes", [MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES + (8 << 20)])
def test_a_message_that_is_too_large_is_refused_with_both_sizes(
    peers: Peers, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    address = peers.serving(None)
    with grpc.insecure_channel(address) as channel:
        send: Any = channel.unary_unary(f"/{SERVICE_NAME}/Describe")
        with pytest.raises(grpc.RpcError) as refused:
            send(bytes(num_bytes), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_of_call(refused.value, address)
    assert type(error) is MessageTooLargeError
    if num_bytes <= MAX_MESSAGE_BYTES + SERVER_SLACK_BYTES:
        assert (error.given, error.allowed) == (num_bytes, MAX_MESSAGE_BYTES)
        assert "a DescribeRequest of more bytes than this server takes" in caplog.messages[0]
    else:
        # gRPC refuses it, and no handler hears of it.
        assert (error.given, error.allowed) == (num_bytes, MAX_MESSAGE_BYTES + SERVER_SLACK_BYTES)
        assert caplog.messages == []


def test_a_client_does_not_send_what_is_too_large(peers: Peers) -> None:
    address = peers.serving(None)
    send: Any = peers.channel(address, None).unary_unary(f"/{SERVICE_NAME}/Describe")
    with pytest.raises(grpc.RpcError) as refused:
        send(bytes(MAX_MESSAGE_BYTES + 1), timeout=TIMEOUT_S)
    error = error_of_call(refused.value, address)
    assert type(error) is MessageTooLargeError
    assert (error.given, error.allowed) == (MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES)


def test_a_server_beyond_loopback_needs_no_insecure_where_it_knows_its_clients(
    files: CertificateFolder, peers: Peers
) -> None:
    port = peers.serving(files.mutual(), bind="0.0.0.0").rpartition(":")[2]
    client = peers.client(files.mutual("client"))
    assert client.describe(f"127.0.0.1:{port}", timeout_s=TIMEOUT_S).incarnation == 50


def test_a_worker_without_a_certificate_does_not_serve(
    files: CertificateFolder, peers: Peers
) -> None:
    with pytest.raises(ConfigError, match="a server that speaks TLS needs a certificate"):
        peers.serving(files.trusting())


@pytest.mark.parametrize("reflection", [True, False])
def test_only_with_reflection_a_server_tells_of_its_services(
    peers: Peers, reflection: bool
) -> None:
    channel = peers.channel(peers.serving(None, reflection=reflection), None)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
    ]
    answers = stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S)
    if not reflection:
        with pytest.raises(grpc.RpcError) as refused:
            next(answers)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        return
    services = {service.name for service in next(answers).list_services_response.service}
    assert services == {
        SERVICE_NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert b"FetchRequest" in next(answers).file_descriptor_response.file_descriptor_proto[0]
