"""Certificates, a key and a token: the files by which processes of a service prove who they are.

The settings hold paths, so that they travel to other processes without any secret in them; every
process reads the files itself, each time it makes a server or a connection.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvferry.proto.errors import ConfigError

DEFAULT_SERVER_NAME = "kvferry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Where this process finds its credentials; whoever has any speaks TLS only.

    Paths are made absolute: a process elsewhere may have another working folder.

    Raises:
        ConfigError: a file is missing or not what it should be, a key without its certificate (or
            the other way round), or a token without TLS.
    """

    certificate: Path | None = None
    """PEM file that this process shows to its peers: its certificate, then intermediate ones.
    Servers need one."""

    key: Path | None = None
    """PEM file of the certificate's private key, not encrypted."""

    ca: Path | None = None
    """PEM file of the authorities that peers' certificates are verified against. With it a server
    asks every client for a certificate; without it for none, and a client verifies servers against
    the authorities that its machine trusts."""

    token_file: Path | None = None
    """File of bearer tokens, one a line: clients send the first with every call, servers take any
    of them. More than one is for changing it."""

    server_name: str = DEFAULT_SERVER_NAME
    """Name that the certificate of every server must hold, wherever it is reached."""

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca", "token_file"):
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, Path(path).absolute())
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "a certificate and its key come together",
                given={"certificate": _text(self.certificate), "key": _text(self.key)},
                allowed="both or none (--tls-cert and --tls-key)",
            )
        if self.certificate is None and self.ca is None:
            raise ConfigError(
                "credentials without TLS: a token would be sent for everybody to read",
                given={"token_file": _text(self.token_file)},
                allowed="a certificate with its key, or the authorities of the servers "
                "(--tls-cert and --tls-key, or --tls-ca)",
            )
        if not self.server_name:
            raise ConfigError("the name of the servers is empty", allowed=DEFAULT_SERVER_NAME)
        client_ssl_context(self)
        if self.token_file is not None:
            self.read_tokens()

    @property
    def proves_clients(self) -> bool:
        """Whether a server with these knows its clients: by their certificates or by the token."""
        return self.ca is not None or self.token_file is not None

    @property
    def tls_files(self) -> tuple[Path, ...]:
        """The files that a side's TLS context is made of."""
        files = (self.certificate, self.key, self.ca)
        return tuple(path for path in files if path is not None)

    def read_tokens(self) -> tuple[str, ...]:
        """Return the tokens as the file has them now, at least one.

        Raises:
            ConfigError: the file cannot be read, or has no tokens.
        """
        assert self.token_file is not None
        _require_readable(self.token_file)
        text = self.token_file.read_text(encoding="utf-8", errors="replace")
        tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
        if not tokens or not all(map(_is_token, tokens)):
            # The text itself is a secret.
            raise ConfigError(
                "the file holds no token",
                given=str(self.token_file),
                allowed="a token of printable ASCII, without spaces, in each line",
            )
        return tokens


def server_ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Return what a listening socket speaks TLS with, made of the files as they are now.

    Raises:
        ConfigError: no certificate, or a file that cannot be used.
    """
    if credentials.certificate is None:
        raise ConfigError(
            "a server that speaks TLS needs a certificate", allowed="--tls-cert and --tls-key"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _show_certificate(context, credentials)
    if credentials.ca is not None:
        _trust(context, credentials.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Return what a connecting socket speaks TLS with, made of the files as they are now.

    To be used with `server_hostname=credentials.server_name`.

    Raises:
        ConfigError: a file that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if credentials.certificate is not None:
        _show_certificate(context, credentials)
    if credentials.ca is None:
        context.load_default_certs()
    else:
        _trust(context, credentials.ca)
    return context


def _show_certificate(context: ssl.SSLContext, credentials: Credentials) -> None:
    assert credentials.certificate is not None
    assert credentials.key is not None
    for path in (credentials.certificate, credentials.key):
        _require_readable(path)
    try:
        # An encrypted key would be asked for on the terminal, but for a password given here.
        context.load_cert_chain(credentials.certificate, credentials.key, password="")
    except ssl.SSLError as error:
        is_other_key = error.reason == "KEY_VALUES_MISMATCH"
        raise ConfigError(
            "cannot use the certificate with its key",
            given={"certificate": str(credentials.certificate), "key": str(credentials.key)},
            allowed=(
                "the certificate's own key"
                if is_other_key
                else "two PEM files, the key not encrypted"
            ),
        ) from None


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    _require_readable(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ConfigError(
            "no authorities in the file", given=str(ca), allowed="certificates as PEM"
        ) from None


def _require_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read a file: {error.strerror}", given=str(path)) from None


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
