"""In which order a rank's memory holds its values: an order by name.

An order is the axes from the outermost to the innermost, one letter each: L layers, S sides (keys
and values; MLA has one side), B blocks, N tokens of a block, H heads. The values of one head come
last and are always contiguous. Some that engines use:

    LSBNH  keys and values apart, tokens first (the default)      [2, B, N, H, D] per layer
    LBSNH  keys and values apart inside the block                 [B, 2, N, H, D] per layer
    LBSHN  the same, heads first                                  [B, 2, H, N, D] per layer
    LBHNS  keys and values of a token concatenated, heads first   [B, H, N, 2 * D] per layer
    BLSNH  all layers of a block together, in one storage         [B, L, 2, N, H, D]
"""

from kvferry.proto.errors import ConfigError

AXES = "LSBNH"
DEFAULT_ORDER = "LSBNH"


def require_order(order: str) -> None:
    """Refuse what is no order of the axes.

    Raises:
        ConfigError: naming the axes.
    """
    if not isinstance(order, str) or sorted(order) != sorted(AXES):
        raise ConfigError(
            "a memory order names each axis once",
            given=order,
            allowed="L layers, S sides, B blocks, N tokens, H heads, e.g. LSBNH",
        )
