"""What credentials may be, and where they allow a server to listen."""

import pickle
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import TOKEN, CertificateFolder

from kvferry.proto.bind import require_safe_bind
from kvferry.proto.credentials import Credentials, client_ssl_context, server_ssl_context
from kvferry.proto.errors import ConfigError, InsecureBindError


@pytest.fixture
def files(tmp_path: Path) -> CertificateFolder:
    return CertificateFolder(tmp_path)


def test_credentials_hold_no_secret_and_survive_pickling(files: CertificateFolder) -> None:
    credentials = files.mutual(token_file=files.token_file())
    pickled = pickle.dumps(credentials)
    assert pickle.loads(pickled) == credentials
    assert TOKEN.encode() not in pickled
    assert credentials.read_tokens() == (TOKEN,)


def test_paths_are_made_absolute(files: CertificateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files.folder)
    assert Credentials(ca=Path("ca.crt")).ca == files.ca


@pytest.mark.parametrize("left_out", ["certificate", "key"])
def test_a_certificate_and_its_key_come_together(files: CertificateFolder, left_out: str) -> None:
    with pytest.raises(ConfigError, match="a certificate and its key come together"):
        files.mutual(**{left_out: None})


def test_a_token_without_tls_is_refused(files: CertificateFolder) -> None:
    with pytest.raises(ConfigError, match="credentials without TLS") as caught:
        Credentials(token_file=files.token_file())
    assert "--tls-ca" in caught.value.allowed


@pytest.mark.parametrize("name", ["certificate", "key", "ca", "token_file"])
def test_a_missing_file_is_named(files: CertificateFolder, name: str) -> None:
    missing = files.folder / "nothing"
    with pytest.raises(ConfigError, match="No such file") as caught:
        files.mutual(**{name: missing})
    assert caught.value.given == str(missing)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("certificate", "cannot use the certificate with its key"),
        ("key", "cannot use the certificate with its key"),
        ("ca", "no authorities in the file"),
    ],
)
def test_a_file_that_is_no_pem_is_refused(
    files: CertificateFolder, name: str, message: str
) -> None:
    text = files.folder / "text"
    text.write_text("not PEM")
    with pytest.raises(ConfigError, match=message) as caught:
        files.mutual(**{name: text})
    assert str(text) in str(caught.value.given)
    assert "PEM" in caught.value.allowed


def test_a_key_of_another_certificate_is_refused(files: CertificateFolder) -> None:
    _, key = files.issue("other")
    with pytest.raises(ConfigError, match="allowed: the certificate's own key"):
        files.mutual(key=key)


def test_a_file_may_hold_several_tokens_one_a_line(files: CertificateFolder) -> None:
    credentials = files.trusting(token_file=files.token_file("first\n\n second \r\n"))
    assert credentials.read_tokens() == ("first", "second")


@pytest.mark.parametrize("text", ["", "\n", "two words", "t\u00f6ken", "good\nnot good"])
def test_a_file_without_a_token_is_refused_without_showing_it(
    files: CertificateFolder, text: str
) -> None:
    path = files.token_file(text)
    with pytest.raises(ConfigError, match="the file holds no token") as caught:
        files.trusting(token_file=path)
    assert caught.value.given == str(path)


def test_a_server_needs_a_certificate(files: CertificateFolder) -> None:
    with pytest.raises(ConfigError, match="a server that speaks TLS needs a certificate"):
        server_ssl_context(files.trusting())


def test_with_authorities_a_server_asks_for_certificates_and_without_for_none(
    files: CertificateFolder,
) -> None:
    certificate, key = files.issue()
    assert server_ssl_context(files.mutual()).verify_mode is ssl.CERT_REQUIRED
    alone = Credentials(certificate=certificate, key=key)
    assert server_ssl_context(alone).verify_mode is ssl.CERT_NONE


def exchanged(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bytes:
    """Shake hands in memory, and return what the server read of what the client sent."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = server.wrap_bio(to_server, to_client, server_side=True)
    connecting = client.wrap_bio(to_client, to_server, server_hostname=name)
    done: set[Any] = set()
    while len(done) < 2:
        for side in (connecting, listening):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    connecting.write(b"block")
    return listening.read()


def test_sockets_of_two_peers_speak_tls(files: CertificateFolder) -> None:
    credentials = files.mutual()
    server, client = server_ssl_context(credentials), client_ssl_context(credentials)
    assert exchanged(server, client, credentials.server_name) == b"block"


def test_a_socket_that_reaches_a_server_of_another_name_refuses_it(
    files: CertificateFolder,
) -> None:
    server, client = server_ssl_context(files.mutual("other")), client_ssl_context(files.mutual())
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'kvferry'"):
        exchanged(server, client, "kvferry")


def test_a_socket_without_a_certificate_is_refused_by_one_that_asks(
    files: CertificateFolder,
) -> None:
    server, client = server_ssl_context(files.mutual()), client_ssl_context(files.trusting())
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        exchanged(server, client, "kvferry")


def test_beyond_loopback_a_server_must_know_its_clients(files: CertificateFolder) -> None:
    certificate, key = files.issue()
    proofs: list[dict[str, Any]] = [{"ca": files.ca}, {"token_file": files.token_file()}]
    for changes in proofs:
        require_safe_bind(
            "0.0.0.0", False, Credentials(certificate=certificate, key=key, **changes)
        )
    alone = Credentials(certificate=certificate, key=key)
    with pytest.raises(InsecureBindError, match="TLS alone lets anyone") as caught:
        require_safe_bind("0.0.0.0", False, alone)
    assert re.match("--tls-ca, --token-file or both", caught.value.allowed)
    require_safe_bind("127.0.0.1", False, alone)
    require_safe_bind("0.0.0.0", True, alone)


def test_without_credentials_the_refusal_names_what_is_missing() -> None:
    with pytest.raises(InsecureBindError) as caught:
        require_safe_bind("0.0.0.0", False, None)
    for option in ("--tls-cert", "--tls-key", "--tls-ca", "--token-file", "--insecure"):
        assert option in caught.value.allowed
