"""Whom a worker's front lets in, whom its client trusts, and what both sides are told otherwise."""

import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.certificates import TOKEN, CertificateFolder
from tests.integration.transfer_peer import content_of, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.credentials import Credentials, client_ssl_context
from kvferry.proto.errors import ConfigError, CredentialsError
from kvferry.proto.grpc_channel import open_channel
from kvferry.proto.grpc_front import HEALTH_CHECK
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation
from kvferry.worker import bulk_server
from kvferry.worker import paths as path_names
from kvferry.worker.block_io import gather
from kvferry.worker.bulk_listener import BulkListener
from kvferry.worker.bulk_wire import TICKET_BYTES, send_frame
from kvferry.worker.frames import Place
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.outgoing import OutgoingFrame
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

    def worker(
        self, credentials: Credentials | None, *, paths: Sequence[path_names.Path] = ()
    ) -> WorkerService:
        plain = new_worker(50, num_blocks=9, num_layers=2, head_size=64)
        worker = WorkerService(
            incarnation=Incarnation(50),
            memory=plain.memory,
            paths=paths,
            credentials=credentials,
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


@pytest.mark.parametrize("paths", [[], ["bulk"], ["shm"]], ids=["grpc", "bulk", "shm"])
def test_two_workers_that_prove_who_they_are_exchange_equal_bytes(
    files: CertificateFolder,
    peers: Peers,
    monkeypatch: pytest.MonkeyPatch,
    paths: list[path_names.Path],
) -> None:
    sent_by: set[type] = set()

    def send(connection: socket.socket, frame: OutgoingFrame) -> None:
        sent_by.add(type(connection))
        send_frame(connection, frame)

    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    monkeypatch.setattr(bulk_server, "send_frame", send)
    credentials = files.mutual(token_file=files.token_file())
    source, taker = (peers.worker(credentials, paths=paths) for _ in range(2))
    fill(source)
    block_ids = [BlockId(i) for i in (8, 3, 5, 1)]
    run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(i) for i in range(4)], block_ids=block_ids)
    outcome = pull_blocks(taker, source.serve(), [run], incarnation=50)
    assert (outcome.num_blocks_of_run, outcome.error) == ((4,), None)
    (group,) = taker.memory.groups
    for index, block_id in enumerate(block_ids):
        arrived = gather(group, [Place(block_id, 0, group.geometry.num_layers)])
        assert bytes(arrived) == content_of(index, group.geometry.block_bytes)
    assert sent_by == ({ssl.SSLSocket} if paths == ["bulk"] else set())


@pytest.mark.parametrize("paths", [[], ["bulk"]], ids=["grpc", "bulk"])
def test_without_authorities_a_worker_trusts_those_of_its_machine_and_asks_for_no_certificate(
    files: CertificateFolder,
    peers: Peers,
    monkeypatch: pytest.MonkeyPatch,
    paths: list[path_names.Path],
) -> None:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    certificate, key = files.issue()
    token_file = files.token_file()
    own = Credentials(certificate=certificate, key=key, token_file=token_file)
    source, taker = (peers.worker(own, paths=paths) for _ in range(2))
    fill(source)
    address = source.serve()
    run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(0)], block_ids=[BlockId(1)])
    refused = pull_blocks(taker, address, [run], incarnation=50)
    assert refused.error_type == "CredentialsError"
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    assert pull_blocks(taker, address, [run], incarnation=50).error is None
    peers.client(files.trusting(token_file=token_file)).describe(address, timeout_s=TIMEOUT_S)


@pytest.fixture
def bulk_log(
    files: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> Iterator[tuple[socket.socket, Callable[[], str]]]:
    """A connection to a bulk port that speaks TLS, and the only line of its log in the end."""
    caplog.set_level(logging.WARNING, "kvferry.worker.bulk_listener")

    def only_line() -> str:
        listener.close()
        listener._greeters.shutdown(wait=True)
        (line,) = caplog.messages
        return line

    with (
        closing(BulkListener("127.0.0.1", files.mutual())) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=TIMEOUT_S) as connection,
    ):
        yield connection, only_line


def test_a_bulk_socket_in_plaintext_is_refused_and_the_log_says_why(
    bulk_log: tuple[socket.socket, Callable[[], str]],
) -> None:
    connection, only_line = bulk_log
    connection.sendall(bytes(TICKET_BYTES))
    with suppress(ConnectionResetError):
        while connection.recv(100):
            pass
    assert re.search("did not show a ticket at the bulk port: .*WRONG_VERSION_NUMBER", only_line())


def test_a_bulk_socket_without_a_certificate_is_refused_on_both_sides(
    files: CertificateFolder, bulk_log: tuple[socket.socket, Callable[[], str]]
) -> None:
    connection, only_line = bulk_log
    context = client_ssl_context(files.trusting())
    with (
        context.wrap_socket(connection, server_hostname="kvferry") as secure,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        secure.recv(1)
    assert re.search("bulk port: .*PEER_DID_NOT_RETURN_A_CERTIFICATE", only_line())


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


def test_the_token_changes_while_all_go_on_and_then_the_old_one_is_refused(
    files: CertificateFolder, strangers: CertificateFolder, peers: Peers
) -> None:
    credentials = files.mutual(token_file=files.token_file("old"))
    address, client = peers.serving(credentials), peers.client(credentials)
    other = peers.client(files.mutual(token_file=strangers.token_file("old")))
    for ours, theirs in (
        ("old\nnew", "old"),
        ("new\nold", "old"),
        ("new\nold", "new"),
        ("new", "new"),
    ):
        files.token_file(ours)
        strangers.token_file(theirs)
        client.describe(address, timeout_s=TIMEOUT_S)
        other.describe(address, timeout_s=TIMEOUT_S)
    strangers.token_file("old")
    assert refusal(other, address).given == "another one"


def test_a_token_file_that_is_gone_leaves_the_token_as_it_was(
    files: CertificateFolder, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = files.mutual(token_file=files.token_file())
    address, client = peers.serving(credentials), peers.client(credentials)
    client.describe(address, timeout_s=TIMEOUT_S)
    (files.folder / "token").unlink()
    for _ in range(2):
        client.describe(address, timeout_s=TIMEOUT_S)
    assert len(caplog.messages) == 2  # the client's and the server's
    assert caplog.messages[0].startswith("the tokens stay as they were, since the new ones fail")


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
