"""Checks that the settings of a service of one model and of one of nodes share."""

import math

from kvferry.proto.errors import ConfigError

MAX_PORT = 65535
MAX_DIGITS = 10


def require_port(name: str, port: int) -> None:
    """Refuse what is no TCP port; 0 stands for any free one.

    Raises:
        ConfigError: naming the setting.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"{name} out of range", given=port, allowed=f"0 to {MAX_PORT}")


def require_seconds(name: str, seconds: float) -> None:
    """Refuse what is no time to wait.

    Raises:
        ConfigError: naming the setting.
    """
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{name} must be positive and finite", given=seconds, allowed="> 0, in seconds"
        )


def require_hash_seed(text: str) -> None:
    """Refuse a text of PYTHONHASHSEED from which processes would make different roots.

    Raises:
        ConfigError: no number, or one that CPython does not take.
    """
    if not (_is_decimal(text) and int(text) < 1 << 32):
        # "random" would give every process another root.
        raise ConfigError(
            "not a PYTHONHASHSEED that processes can share",
            given=text,
            allowed="0 to 4294967295",
        )


def require_ray_address(text: str) -> None:
    """Refuse what names no Ray cluster.

    Raises:
        ConfigError: neither `local`, `auto` nor host:port.
    """
    host, _, port = text.rpartition(":")
    is_place = bool(host) and _is_decimal(port) and 0 < int(port) <= MAX_PORT
    if text not in ("local", "auto") and not (is_place and "/" not in host):
        raise ConfigError(
            "not the address of a Ray cluster",
            given=text,
            allowed="local, auto or host:port",
        )


def _is_decimal(text: str) -> bool:
    # Other scripts have digits too, and Python refuses to convert thousands of them.
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
