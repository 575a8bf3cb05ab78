"""Why does no connection come about? gRPC often says only that the other side closed it.

So the other side is asked once more, over a socket of our own: a small shell.
"""

import socket
import ssl

from kvferry.proto.credentials import Credentials, client_ssl_context
from kvferry.proto.errors import CredentialsError

PROBE_TIMEOUT_S = 1.0


def why_no_connection(address: str, credentials: Credentials | None) -> CredentialsError | None:
    """Return what keeps a client from the gRPC server at `address`; None if it is not credentials.

    Takes up to `PROBE_TIMEOUT_S` for each of connecting, the handshake, and the first answer.

    Args:
        address: "host:port".
        credentials: the client's.

    Raises:
        ConfigError: the client's own files cannot be used any more.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S
        ) as plain:
            if credentials is None:
                return _ask_whether_tls(plain, address)
            return _ask_with(credentials, plain, address)
    except OSError:
        return None


def _ask_whether_tls(plain: socket.socket, address: str) -> CredentialsError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # The handshake ends before such a server looks at the client's certificate.
    with context.wrap_socket(plain):
        return CredentialsError(
            f"the server at {address} speaks TLS and this client plaintext",
            given="no credentials",
            allowed="--tls-ca, or credentials of the service",
        )


def _ask_with(
    credentials: Credentials, plain: socket.socket, address: str
) -> CredentialsError | None:
    context = client_ssl_context(credentials)
    context.set_alpn_protocols(["h2"])
    try:
        secure = context.wrap_socket(plain, server_hostname=credentials.server_name)
    except ssl.SSLCertVerificationError as error:
        return CredentialsError(
            f"the certificate of the server at {address} is wrong: {error.verify_message}",
            given={"ca": str(credentials.ca), "server_name": credentials.server_name},
            allowed="a certificate for that name, of an authority in that file",
        )
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        return CredentialsError(
            f"the server at {address} does not speak TLS and this client does", given=error.reason
        )
    with secure:
        return None if _answers(secure) else _certificate_refused(credentials, address)


def _answers(secure: ssl.SSLSocket) -> bool:
    """Return whether the server goes on: one that takes the client tells its settings at once."""
    try:
        return secure.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def _certificate_refused(credentials: Credentials, address: str) -> CredentialsError:
    return CredentialsError(
        f"the server at {address} ended the connection when it had seen this client's certificate",
        given=str(credentials.certificate) if credentials.certificate else "no certificate",
        allowed="a certificate of an authority that the server trusts",
    )
