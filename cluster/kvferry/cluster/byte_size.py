"""Sizes in bytes as people write them."""

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

from kvferry.proto.errors import ConfigError

UNITS: Mapping[str, int] = MappingProxyType(
    {"B": 1}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)}
    | {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
)
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "512MiB", "1.5 GiB" or "1000000" means.

    A number without a unit is one of bytes; a part of a byte is dropped.

    Raises:
        ConfigError: not a number and one of `UNITS`.
    """
    match = _SIZE.fullmatch(text)
    unit = UNITS.get(match[2] or "B") if match else None
    if match is None or unit is None:
        raise ConfigError(
            "not a size in bytes",
            given=text,
            allowed=f"a number and one of {', '.join(UNITS)}, such as 512MiB",
        )
    return int(Decimal(match[1]) * unit)
