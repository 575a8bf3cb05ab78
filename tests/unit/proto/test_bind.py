"""Where others reach a server, whatever it listens on."""

import pytest

from kvferry.proto.bind import reachable_address


@pytest.mark.parametrize(
    ("address", "node_host", "expected"),
    [
        ("127.0.0.1:80", "10.0.0.7", "127.0.0.1:80"),
        ("0.0.0.0:80", "10.0.0.7", "10.0.0.7:80"),
        ("[::]:80", "fd00::7", "[fd00::7]:80"),
        ("tcp://0.0.0.0:80", "10.0.0.7", "tcp://10.0.0.7:80"),
        ("tcp://[::]:80", "fd00::7", "tcp://[fd00::7]:80"),
        ("tcp://[::1]:80", "fd00::7", "tcp://[::1]:80"),
        ("ipc:///tmp/events", "10.0.0.7", "ipc:///tmp/events"),
    ],
)
def test_only_what_listens_on_every_interface_is_reached_at_the_nodes_host(
    address: str, node_host: str, expected: str
) -> None:
    assert reachable_address(address, lambda: node_host) == expected
