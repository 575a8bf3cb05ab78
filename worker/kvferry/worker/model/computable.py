"""Which layouts the reference engine computes with. Pure."""

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import DEFAULT_ORDER


def require_computable(layout: Layout, *, who: str) -> None:
    """Refuse a layout that the reference engine cannot compute with.

    Raises:
        ConfigError: naming the rule and both values: it deals tokens over ranks (kind grid, dcp and
            pcp), but cuts neither heads (tp) nor layers (pp), and has one order of memory.
    """
    for name, given, allowed in (
        ("kind", layout.kind, "grid"),
        ("tp", layout.tp, 1),
        ("pp", layout.pp, 1),
        ("memory", layout.memory, DEFAULT_ORDER),
    ):
        if given != allowed:
            raise ConfigError(
                f"{who}: the reference engine deals tokens over ranks (dcp, pcp) and nothing else",
                given={name: given},
                allowed={name: allowed},
            )
