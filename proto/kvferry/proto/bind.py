"""May a server listen on this host? Loopback always; anything else only when asked for by name."""

import ipaddress
from collections.abc import Callable

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import InsecureBindError

_EVERY_INTERFACE = ("0.0.0.0", "::")


def require_safe_plain_bind(host: str, insecure: bool) -> None:
    """Refuse to let a server listen beyond this machine that speaks plaintext only.

    Raises:
        InsecureBindError: `host` is not loopback and `insecure` is False.
    """
    if not insecure and not is_loopback(host):
        raise InsecureBindError(
            "this would be read by anyone on the network: it travels in plaintext, with "
            "credentials or without",
            given=host,
            allowed="127.0.0.1, ::1 or localhost; any address with --insecure",
        )


def require_safe_bind(host: str, insecure: bool, credentials: Credentials | None) -> None:
    """Refuse to listen beyond this machine where anyone could come in.

    That is so unless credentials tell clients apart or the operator said `insecure`. A
    name other than "localhost" counts as beyond loopback: what it resolves to can change.

    Raises:
        InsecureBindError: `host` is not loopback, `insecure` is False, and there are no
            credentials, or none that tell clients apart.
    """
    if insecure or is_loopback(host):
        return
    if credentials is None:
        raise InsecureBindError(
            "listening beyond loopback lets anyone on the network read and write cached blocks",
            given=host,
            allowed="127.0.0.1, ::1 or localhost; any address with credentials (--tls-cert and "
            "--tls-key with --tls-ca, --token-file or both) or with --insecure",
        )
    if not credentials.proves_clients:
        raise InsecureBindError(
            "TLS alone lets anyone on the network in: this server would ask its clients neither "
            "for a certificate nor for a token",
            given=host,
            allowed="--tls-ca, --token-file or both beside the certificate; or --insecure",
        )


def join_address(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_address(address: str, node_host: Callable[[], str]) -> str:
    """Return where others reach a server that listens at `address`: host:port, any scheme before.

    One that listens on every interface is reached at its machine's own host, `node_host()`.
    """
    scheme, separator, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if host.strip("[]") not in _EVERY_INTERFACE:
        return address
    return f"{scheme}{separator}{join_address(node_host(), int(port))}"
