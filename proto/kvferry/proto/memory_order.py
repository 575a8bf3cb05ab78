"""In which order a rank's memory holds its values: an order by name, and the strides it stands for.

An order is the axes from the outermost to the innermost, one letter each: L layers, S sides (keys
and values; MLA has one side), B blocks, N tokens of a block, H heads. The values of one head come
last and are always contiguous. Some that engines use:

    LSBNH  keys and values apart, tokens first (the default)      [2, B, N, H, D] per layer
    LBSNH  keys and values apart inside the block                 [B, 2, N, H, D] per layer
    LBSHN  the same, heads first                                  [B, 2, H, N, D] per layer
    LBHNS  keys and values of a token concatenated, heads first   [B, H, N, 2 * D] per layer
    BLSNH  all layers of a block together, in one storage         [B, L, 2, N, H, D]
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
    """Where a value lies: its storage, and its distance in bytes from the storage's start.

    With `layer_bytes` None every layer has a storage of its own. Strides need not be those of a
    named order: pages may be padded, and axes nested in any way.
    """

    layer_bytes: int | None
    side_bytes: int
    block_bytes: int
    token_bytes: int
    head_bytes: int

    def storage(self, layer: int) -> int:
        """Return the number of the storage that holds a layer (the rank's k-th)."""
        return layer if self.layer_bytes is None else 0

    def offset(self, layer: int, side: int, block: int, token: int, head: int) -> int:
        """Return the distance in bytes of a head's first value from its storage's start."""
        return (
            layer * (self.layer_bytes or 0)
            + side * self.side_bytes
            + block * self.block_bytes
            + token * self.token_bytes
            + head * self.head_bytes
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

    With the layers outermost each has a storage of its own, otherwise all share one. Sizes are
    those of one rank; `head_bytes` are the bytes of one head's values of one token and side.

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
    strides: dict[str, int] = {}
    step = head_bytes
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return Strides(
        layer_bytes=None if order[0] == "L" else strides["L"],
        side_bytes=strides["S"],
        block_bytes=strides["B"],
        token_bytes=strides["N"],
        head_bytes=strides["H"],
    )
