"""Can this machine listen on a host and port? Asks the system; what may listen is in bind.py."""

import errno
import socket

from kvferry.proto.errors import ConfigError, PortTakenError


def require_free(host: str, port: int) -> None:
    """Refuse an address that this machine cannot listen on now, before anything is started.

    Raises:
        ConfigError: `host` is not an address of this machine.
        PortTakenError: another process listens on the port.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        raise why_not_listening(host, port, error) from None


def why_not_listening(host: str, port: int, error: Exception) -> ConfigError | PortTakenError:
    """Return the error that tells why nothing could listen; `error` is the system's own, or gRPC's.

    gRPC says only that it failed, so the system is asked again.
    """
    if not isinstance(error, OSError):
        try:
            require_free(host, port)
        except (ConfigError, PortTakenError) as reason:
            return reason
    elif error.errno != errno.EADDRINUSE:
        return ConfigError(
            f"cannot listen on this host: {error.strerror}",
            given=host,
            allowed="an address of this machine",
        )
    return PortTakenError(
        "another process listens on the port",
        given=f"{host}:{port}",
        allowed="a free port, or 0 for any",
    )
