"""A service whose processes have credentials: clients and engines at the control front, a store."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from tests.builders import make_identity, make_info
from tests.certificates import CertificateFolder
from tests.integration.client_service import ClientService, running_client_service

from kvferry.cluster.client import connect
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.coordinator.control_server import ControlServer
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import CredentialsError, InsecureBindError
from kvferry.proto.messages import (
    Command,
    Describe,
    Description,
    Registered,
    RegisterInstance,
    Reply,
)
from kvferry.worker.transfer_client import TransferClient

IDENTITY = make_identity(num_layers=2, num_kv_heads=3)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFolder:
    return CertificateFolder(tmp_path / "ours")


@contextmanager
def serving(credentials: Credentials) -> Iterator[ClientService]:
    with running_client_service(IDENTITY, num_blocks=11, credentials=credentials) as service:
        yield service


def random_layers(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, num_tokens, 3, 8, generator=generator) for _ in range(2)]


def test_a_client_with_a_certificate_and_the_token_stores_and_fetches_equal_bytes(
    files: CertificateFolder,
) -> None:
    credentials = files.mutual(token_file=files.token_file())
    tokens, stored = list(range(8)), random_layers(8)
    with (
        serving(credentials) as service,
        connect(service.address, timeout_s=5.0, credentials=credentials) as ferry,
    ):
        cache = ferry.model(IDENTITY)
        assert cache.store(tokens, stored) == 8
        into = [torch.zeros_like(layer) for layer in stored]
        assert cache.fetch(tokens, into=into) == 8
    for one, other in zip(into, stored, strict=True):
        assert torch.equal(one, other)


def test_a_client_hears_which_credential_is_missing(files: CertificateFolder) -> None:
    with serving(files.mutual(token_file=files.token_file())) as service:
        for theirs, reason in (
            (None, "speaks TLS and this client plaintext"),
            (files.trusting(), "had seen this client's certificate; given: no certificate"),
            (files.mutual("client"), "the call has no token"),
        ):
            with pytest.raises(CredentialsError, match=reason):
                connect(service.address, timeout_s=5.0, credentials=theirs)


def test_an_engine_takes_its_credentials_along_to_another_process(
    files: CertificateFolder,
) -> None:
    credentials = files.mutual(token_file=files.token_file())
    info = make_info(identity=IDENTITY)
    with serving(credentials) as service:
        client = pickle.loads(pickle.dumps(CoordinatorClient(service.address, credentials)))
        command = RegisterInstance(call_id="1", info=info)
        assert isinstance(client.call(command, timeout_s=5.0), Registered)
        with pytest.raises(CredentialsError, match="speaks TLS"):
            CoordinatorClient(service.address).call(command, timeout_s=5.0)


def test_a_client_of_the_control_front_shows_its_new_certificate_at_its_next_call(
    files: CertificateFolder, tmp_path: Path
) -> None:
    strangers = CertificateFolder(tmp_path / "theirs")
    credentials = files.mutual()
    with (
        serving(strangers.mutual()) as service,
        closing(ControlClient(service.address, 5.0, credentials)) as client,
    ):
        with pytest.raises(CredentialsError, match="certificate of the server"):
            client.call(Describe())
        files.become(strangers)
        assert isinstance(client.call(Describe()), Description)


def test_a_control_front_beyond_loopback_must_know_its_clients(files: CertificateFolder) -> None:
    certificate, key = files.issue()
    alone = Credentials(certificate=certificate, key=key)
    with pytest.raises(InsecureBindError, match="TLS alone"):
        ControlServer(_never, bind="0.0.0.0", port=0, insecure=False, credentials=alone)
    front = ControlServer(
        _never, bind="0.0.0.0", port=0, insecure=False, credentials=files.mutual()
    )
    front.stop()


def _never(_: Command) -> Reply:
    raise AssertionError("no call comes")


LISTEN = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from kvferry.proto.credentials import Credentials
from kvferry.proto.grpc_front import listen, make_server
certificate, key, ca = map(Path, sys.argv[1:])
credentials = Credentials(certificate=certificate, key=key, ca=ca)
server = make_server(ThreadPoolExecutor(1), credentials)
print(listen(server, "127.0.0.1", 0, credentials), flush=True)
server.start()
sys.stdin.read()
"""


def test_grpcs_own_log_at_the_server_says_why_a_handshake_failed(
    files: CertificateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "info")
    certificate, key = files.issue()
    command = [sys.executable, "-c", LISTEN, str(certificate), str(key), str(files.ca)]
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        for credentials in (None, files.trusting()):
            client = stack.enter_context(closing(TransferClient(credentials)))
            with pytest.raises(CredentialsError):
                client.describe(address, timeout_s=5.0)
        _, log = server.communicate(timeout=10.0)
    for reason in ("WRONG_VERSION_NUMBER", "PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        assert any("Handshake failed" in line and reason in line for line in log.splitlines())
