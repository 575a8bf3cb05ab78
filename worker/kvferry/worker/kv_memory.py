"""The KV tensors of one rank: raw allocations that groups of layers share, viewed as blocks.

Where a value lies in them is said by the layout's memory order, and by nothing else: the views have
one shape and the bytes sent have one order, whatever the strides.
"""

from dataclasses import dataclass

import torch

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import GroupId
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import Strides, strides_of
from kvferry.proto.placement import holdings, shape_of
from kvferry.proto.specs import require_integer
from kvferry.worker.device import Device, DeviceBytes
from kvferry.worker.frames import Geometry

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of KV memory with this name.

    Raises:
        ConfigError: none of that name can be moved.
    """
    if name not in TORCH_DTYPES:
        raise ConfigError("unsupported KV dtype", given=name, allowed=sorted(TORCH_DTYPES))
    return TORCH_DTYPES[name]


def require_pages(identity: Identity) -> torch.dtype:
    """Return the dtype of the identity's KV memory; refuse layers that keep no keys and values.

    Raises:
        ConfigError: a group with a recurrent state or without layers, or a KV dtype that cannot be
            moved.
    """
    for group_id, group in enumerate(identity.groups):
        if not group.layers:
            raise ConfigError(f"group {group_id} has no layers", given=0, allowed=">= 1")
        if group.kind == "mamba":
            raise ConfigError(
                f"KV memory has no room for the recurrent states of group {group_id}",
                given=group.kind,
                allowed="groups with keys and values: full, sliding_window, chunked_local",
            )
    return torch_dtype(identity.kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """The memory as the blocks of one group of layers: what is read, written and sent.

    `layers` (counted within the group) and `heads` are those that lie here, of all the model has.
    `sides[k][s]` are the device's bytes from where side s (0 keys, 1 values) of layer `layers[k]`
    begins to the end of its storage; the values of a head lie
    `strides.offset(block=..., token=..., head=...)` bytes into it. There are no gaps.
    """

    device: Device
    num_blocks: int
    layers: range
    heads: range
    geometry: Geometry
    sides: tuple[tuple[DeviceBytes, DeviceBytes], ...]
    strides: Strides

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys (or values) of one token in one layer."""
        return self.geometry.page_bytes // (2 * self.geometry.block_tokens * len(self.heads))

    @property
    def has_whole_halves(self) -> bool:
        """Whether a block's keys (or values) of a layer lie side by side, in the order sent."""
        return (self.strides.head_step, self.strides.token_step) == (
            self.head_bytes,
            self.head_bytes * len(self.heads),
        )


class KvMemory:
    """KV memory of `num_blocks` blocks (the null block 0 included) on one device.

    There is room for as many layers as the largest group has, in one raw allocation each or in one
    for all (`strides_of`); room k is shared by the k-th layer of every group. A block id is a block
    of one group at a time, so nothing overlaps.

    `layers[i]` is the tensor of the i-th layer that lies here, of shape
    [2 (K, V), num_blocks, block_tokens, num_kv_heads, head_size], with the strides of the layout's
    memory order; slot s of the slot mapping is token `s % block_tokens` of block
    `s // block_tokens`. `groups[g]` is the same memory as the blocks of group g.

    Args:
        device: where the memory lies.
        identity: what the blocks hold: layers, groups, heads, dtype.
        num_blocks: number of block ids, shared by all groups.
        layout: how the instance's ranks share layers, heads and tokens; of every group.
        rank: which of them this is.

    Raises:
        ConfigError: `num_blocks` is not a positive integer, an unknown dtype, a page too large to
            be sent, a layout that does not fit the identity, a rank that it does not have, a group
            without layers here or of a kind that keeps no keys and values.
    """

    def __init__(
        self,
        device: Device,
        identity: Identity,
        *,
        num_blocks: int,
        layout: Layout,
        rank: int = 0,
    ) -> None:
        require_integer("num_blocks", num_blocks, at_least=1)
        layout.place(rank)  # refuses a rank that there is not
        kv_dtype = require_pages(identity)
        self.identity = identity
        self.num_blocks = num_blocks
        self.layout = layout
        self.rank = rank
        held = [
            holdings(layout, shape_of(identity, GroupId(group_id)))[rank]
            for group_id in range(len(identity.groups))
        ]
        num_heads = len(held[0].heads)
        head_bytes = identity.head_size * kv_dtype.itemsize
        geometries = [
            Geometry(
                num_layers=len(share.layers),
                page_bytes=2 * layout.block_tokens * num_heads * head_bytes,
                block_tokens=layout.block_tokens,
            )
            for share in held
        ]
        num_rooms = max(geometry.num_layers for geometry in geometries)
        strides = strides_of(
            layout.memory,
            num_layers=num_rooms,
            num_sides=2,
            num_blocks=num_blocks,
            block_tokens=layout.block_tokens,
            num_heads=num_heads,
            head_bytes=head_bytes,
        )
        num_storages = 1 + strides.storage(num_rooms - 1)
        num_bytes = num_rooms * num_blocks * geometries[0].page_bytes // num_storages
        storages = [device.allocate(num_bytes) for _ in range(num_storages)]
        shape = (2, num_blocks, layout.block_tokens, num_heads, identity.head_size)
        tensors = [_view(storages, strides, room, kv_dtype, shape) for room in range(num_rooms)]
        tensor_of_layer = {
            group.layers[index]: tensor
            for group, share in zip(identity.groups, held, strict=True)
            for index, tensor in zip(share.layers, tensors, strict=False)
        }
        self.layers = [tensor_of_layer[layer] for layer in sorted(tensor_of_layer)]
        sides = [_sides(device, storages, strides, room) for room in range(num_rooms)]
        self.groups = tuple(
            GroupMemory(
                device=device,
                num_blocks=num_blocks,
                layers=share.layers,
                heads=share.heads,
                geometry=geometry,
                sides=tuple(sides[: geometry.num_layers]),
                strides=strides,
            )
            for share, geometry in zip(held, geometries, strict=True)
        )

    def group(self, group_id: GroupId) -> GroupMemory:
        """Return the memory as the blocks of one group.

        Raises:
            BadInputError: no such group, naming those there are.
        """
        if not 0 <= group_id < len(self.groups):
            raise BadInputError(
                "no such group of layers here",
                given=group_id,
                allowed=list(range(len(self.groups))),
            )
        return self.groups[group_id]


def _view(
    storages: list[torch.Tensor],
    strides: Strides,
    room: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Return the room for a layer as a tensor of this shape, a head's values last."""
    steps = (strides.side_step, strides.block_step, strides.token_step, strides.head_step)
    return torch.as_strided(
        storages[strides.storage(room)].view(dtype),
        shape,
        [*(step // dtype.itemsize for step in steps), 1],
        strides.offset(layer=room) // dtype.itemsize,
    )


def _sides(
    device: Device, storages: list[torch.Tensor], strides: Strides, room: int
) -> tuple[DeviceBytes, DeviceBytes]:
    """Return the bytes from where the keys of the room begin, and from where the values do."""
    storage = device.as_bytes(storages[strides.storage(room)])
    keys, values = (strides.offset(layer=room, side=side) for side in (0, 1))
    return storage[keys:], storage[values:]
