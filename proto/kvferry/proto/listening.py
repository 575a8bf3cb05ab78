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
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                "another process listens on the port", given=port, allowed="a free port"
            ) from None
        raise ConfigError(
            f"cannot listen on this host: {error.strerror}",
            given=host,
            allowed="an address of this machine",
        ) from None
