"""Whether this machine can listen on a host and port."""

import socket

import pytest

from kvferry.proto.errors import ConfigError, PortTakenError
from kvferry.proto.listening import require_free


def test_a_free_port_and_any_port_are_accepted() -> None:
    require_free("127.0.0.1", 0)
    require_free("localhost", 0)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"given: 127.0.0.1:{port}"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "999.1.1.1"])
def test_a_host_that_is_not_this_machines_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on this host.*given: " + host):
        require_free(host, 0)
