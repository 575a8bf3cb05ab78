"""The strides that a memory order stands for: the oracle's own memory, whatever its order."""

from dataclasses import dataclass

from kvferry.proto.memory_order import require_order


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
