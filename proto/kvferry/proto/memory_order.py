"""In which order a rank's memory holds its values: an order by name, and the strides it stands for.

An order is the axes from the outermost to the innermost, one letter each: L layers, S sides (keys
and values; MLA has one side), B blocks, N tokens of a block, H heads. The values of one head come
last and are always contiguous. Some that engines use:

    LSBNH  keys and values apart, tokens first (the default)      [2, B, N, H, D] per layer
    LBSNH  keys and values apart inside the block                 [B, 2, N, H, D] per layer
    LBSHN  the same, heads first                                  [B, 2, H, N, D] per layer
    LBHNS  keys and values of a token concatenated, heads first   [B, H, N, 2 * D] per layer
    BLSNH  all layers of a block together, in one storage         [B, L, 2, N, H, D]

With the layers outermost every layer has a storage of its own, otherwise all share one.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """Where a head's values lie: their storage, and their distance in bytes from its start.

    Each step is the distance in bytes from one index of its axis to the next. With `layer_step`
    None every layer has a storage of its own. Steps need not be those of a named order: pages may
    be padded, and axes nested in any way.
    """

    layer_step: int | None
    side_step: int
    block_step: int
    token_step: int
    head_step: int

    def storage(self, layer: int) -> int:
        """Return the number of the storage that holds a layer (the rank's k-th)."""
        return layer if self.layer_step is None else 0

    def offset(
        self, *, layer: int = 0, side: int = 0, block: int = 0, token: int = 0, head: int = 0
    ) -> int:
        """Return the distance in bytes of a head's first value from its storage's start."""
        return (
            layer * (self.layer_step or 0)
            + side * self.side_step
            + block * self.block_step
            + token * self.token_step
            + head * self.head_step
        )


def strides_of(
    order: str,
    *,
    num_layers: int,
    num_sides: int,
    num_blocks: int,
    block_tokens: int,
    num_heads: int,
    head_bytes: int,
) -> Strides:
    """Return the strides of memory without gaps in a named order.

    Sizes are those of one rank; `head_bytes` are the bytes of one head's values of one token and
    side.

    Raises:
        ConfigError: no such order.
    """
    require_order(order)
    sizes = {
        "L": num_layers,
        "S": num_sides,
        "B": num_blocks,
        "N": block_tokens,
        "H": num_heads,
    }
    steps: dict[str, int] = {}
    step = head_bytes
    for axis in reversed(order):
        steps[axis] = step
        step *= sizes[axis]
    return Strides(
        layer_step=None if order[0] == "L" else steps["L"],
        side_step=steps["S"],
        block_step=steps["B"],
        token_step=steps["N"],
        head_step=steps["H"],
    )
