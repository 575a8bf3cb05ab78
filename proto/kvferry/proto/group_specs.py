"""From the groups of an identity to the specs that their caches are built from."""

from collections.abc import Sequence
from typing import Any

from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    SlidingWindowSpec,
    WholeLengthSpec,
)


def spec_of_group(identity: Identity, group: GroupSpec, block_tokens: int) -> LayerSpec:
    """Return the spec of each layer of a group, in blocks of `block_tokens` tokens.

    An identity knows no more of a recurrent state than its size, so it is one tensor of bytes, and
    one is kept per block.

    Raises:
        ConfigError: `block_tokens` is no integer of at least 1, or the size of `kv_dtype` is not
            known.
    """
    # A group has the setting of its own kind and no other, so the setting tells the kind.
    if group.state_bytes is not None:
        return MambaSpec(
            block_tokens=block_tokens,
            shapes=((group.state_bytes,),),
            dtypes=("uint8",),
            mode="all",
        )
    attention: dict[str, Any] = {
        "block_tokens": block_tokens,
        "kv_heads": identity.num_kv_heads,
        "head_dim": identity.head_size,
        "dtype": identity.kv_dtype,
    }
    if group.window_tokens is not None:
        return SlidingWindowSpec(**attention, window_tokens=group.window_tokens)
    if group.chunk_tokens is not None:
        return ChunkedLocalSpec(**attention, chunk_tokens=group.chunk_tokens)
    return FullSpec(**attention)


def specs_of(identity: Identity, block_tokens: int) -> tuple[LayerSpec, ...]:
    """Return the spec of each group of an identity, in group order.

    Raises:
        ConfigError: as `spec_of_group`.
    """
    return tuple(spec_of_group(identity, group, block_tokens) for group in identity.groups)


def takes_partial_loads(specs: Sequence[LayerSpec]) -> bool:
    """Tell whether a load that ended early is of use, by the specs of all groups.

    It is where there is one group and a prefix needs each of its blocks: what arrived is a shorter
    prefix then. Engine, coordinator and client must agree on it.
    """
    return len(specs) == 1 and isinstance(specs[0], WholeLengthSpec)
