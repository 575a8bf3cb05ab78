"""Which layouts the reference engine computes with. Pure."""

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout


def require_computable(layout: Layout, *, who: str) -> None:
    """Refuse a layout that the reference engine cannot compute with.

    Raises:
        ConfigError: naming the rule and both values: it deals tokens over ranks (kind grid, dcp and
            pcp), but cuts neither heads (tp) nor layers (pp). Any memory order will do.
    """
    for name, given, allowed in (
        ("kind", layout.kind, "grid"),
        ("tp", layout.tp, 1),
        ("pp", layout.pp, 1),
    ):
        if given != allowed:
            raise ConfigError(
                f"{who}: the reference engine deals tokens over ranks (dcp, pcp) and nothing else",
                given={name: given},
                allowed={name: allowed},
            )
