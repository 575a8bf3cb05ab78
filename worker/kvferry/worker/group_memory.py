"""KV memory as the blocks of one group of layers, wherever the memory itself comes from.

Where a value lies is said by the layout's memory order, and by nothing else: blocks have one shape
and the bytes sent have one order, whatever the strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import GroupId
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import Strides, strides_of
from kvferry.proto.placement import Holding, holdings, shape_of
from kvferry.worker.arena import HostBytes
from kvferry.worker.device import Device, DeviceBytes
from kvferry.worker.dtypes import require_pages
from kvferry.worker.frames import Geometry

HostLayer = tuple[HostBytes, HostBytes]
"""Keys and values of a layer in host memory, each [num_blocks, block_tokens, heads, head_bytes]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """The memory as the blocks of one group of layers: what is read, written and sent.

    `layers` (counted within the group) and `heads` are those that lie here, of all the model has.
    `sides[k][s]` are the device's bytes from where side s (0 keys, 1 values) of layer `layers[k]`
    begins to the end of its storage; the values of a head lie
    `strides.offset(block=..., token=..., head=...)` bytes into it. There are no gaps. `host_sides`
    are the same where the device is host memory, None elsewhere. `head_bytes` are those of one
    head's keys (or values) of one token in one layer. `has_whole_halves`: a block's keys (or
    values) of a layer lie side by side, in the order sent.
    """

    device: Device
    num_blocks: int
    layers: range
    heads: range
    geometry: Geometry
    sides: tuple[tuple[DeviceBytes, DeviceBytes], ...]
    host_sides: tuple[tuple[memoryview, memoryview], ...] | None
    strides: Strides
    head_bytes: int
    has_whole_halves: bool

    def host_layers(self) -> list[HostLayer]:
        """Return keys and values of each layer, where they lie, in whatever memory order.

        Raises:
            ConfigError: the memory is not the host's.
        """
        shape = (self.num_blocks, self.geometry.block_tokens, len(self.heads), self.head_bytes)
        steps = (self.strides.block_step, self.strides.token_step, self.strides.head_step, 1)

        def view(side: DeviceBytes) -> HostBytes:
            if not isinstance(side, np.ndarray):
                raise ConfigError("memory that is not the host's", given=self.device.name)
            return as_strided(side, shape, steps, writeable=side.flags.writeable)

        return [(view(keys), view(values)) for keys, values in self.sides]


class MemoryPlan:
    """What one rank holds, and where: its storages, and the groups' blocks in them.

    There is room for as many layers as the largest group has, in one raw storage each or in one for
    all (`strides_of`); room k is shared by the k-th layer of every group. A block id is a block of
    one group at a time, so nothing overlaps.

    Raises:
        ConfigError: an unknown dtype, a page too large to be sent, a layout that does not fit the
            identity, a rank that it does not have, a group without layers here or of a kind that
            keeps no keys and values.
    """

    def __init__(self, identity: Identity, *, num_blocks: int, layout: Layout, rank: int) -> None:
        layout.place(rank)  # refuses a rank that there is not
        self.kv_dtype = require_pages(identity)
        self.num_blocks = num_blocks
        self.held: list[Holding] = [
            holdings(layout, shape_of(identity, GroupId(group_id)))[rank]
            for group_id in range(len(identity.groups))
        ]
        num_heads = len(self.held[0].heads)
        self.head_bytes = head_bytes = identity.head_size * self.kv_dtype.itemsize
        self.geometries = [
            Geometry(
                num_layers=len(share.layers),
                page_bytes=2 * layout.block_tokens * num_heads * head_bytes,
                block_tokens=layout.block_tokens,
            )
            for share in self.held
        ]
        self.num_rooms = max(geometry.num_layers for geometry in self.geometries)
        self.strides = strides_of(
            layout.memory,
            num_layers=self.num_rooms,
            num_sides=2,
            num_blocks=num_blocks,
            block_tokens=layout.block_tokens,
            num_heads=num_heads,
            head_bytes=head_bytes,
        )
        num_storages = 1 + self.strides.storage(self.num_rooms - 1)
        num_bytes = self.num_rooms * num_blocks * self.geometries[0].page_bytes
        self.storage_sizes = [num_bytes // num_storages] * num_storages
        # [2 (K, V), num_blocks, block_tokens, num_kv_heads, head_size] of a layer.
        self.shape = (2, num_blocks, layout.block_tokens, num_heads, identity.head_size)

    def groups(self, device: Device, storages: Sequence[DeviceBytes]) -> tuple[GroupMemory, ...]:
        """Return the groups' blocks in storages of the planned sizes."""
        sides = [self._sides(storages, room) for room in range(self.num_rooms)]
        steps = (self.strides.head_step, self.strides.token_step)
        # A slice of a memoryview costs a third of one of an array.
        views = [
            (keys.data, values.data)
            for keys, values in sides
            if isinstance(keys, np.ndarray) and isinstance(values, np.ndarray)
        ]
        return tuple(
            GroupMemory(
                device=device,
                num_blocks=self.num_blocks,
                layers=share.layers,
                heads=share.heads,
                geometry=geometry,
                sides=tuple(sides[: geometry.num_layers]),
                host_sides=tuple(views[: geometry.num_layers]) if views else None,
                strides=self.strides,
                head_bytes=self.head_bytes,
                has_whole_halves=steps == (self.head_bytes, self.head_bytes * len(share.heads)),
            )
            for share, geometry in zip(self.held, self.geometries, strict=True)
        )

    def _sides(self, storages: Sequence[DeviceBytes], room: int) -> tuple[DeviceBytes, DeviceBytes]:
        """Return the bytes from where the keys of the room begin, and from where the values do."""
        storage = storages[self.strides.storage(room)]
        keys, values = (self.strides.offset(layer=room, side=side) for side in (0, 1))
        return storage[keys:], storage[values:]
