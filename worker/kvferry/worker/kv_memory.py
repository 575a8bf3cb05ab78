"""The KV tensors of one rank: raw storages that groups of layers share, viewed as blocks."""

import torch

from kvferry.proto.errors import BadInputError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import GroupId
from kvferry.proto.layout import Layout
from kvferry.proto.specs import require_integer
from kvferry.worker.device import Device
from kvferry.worker.group_memory import GroupMemory, MemoryPlan


class KvMemory:
    """KV memory of `num_blocks` blocks (the null block 0 included) on one device.

    `layers[i]` is the tensor of the i-th layer that lies here, of shape
    [2 (K, V), num_blocks, block_tokens, num_kv_heads, head_size], with the strides of the layout's
    memory order; slot s of the slot mapping is token `s % block_tokens` of block
    `s // block_tokens`. `groups[g]` is the same memory as the blocks of group g. `arena` is what
    other processes of this host can map it by, None where they cannot.

    Args:
        device: where the memory lies.
        identity: what the blocks hold: layers, groups, heads, dtype.
        num_blocks: number of block ids, shared by all groups.
        layout: how the instance's ranks share layers, heads and tokens; of every group.
        rank: which of them this is.

    Raises:
        ConfigError: `num_blocks` is not a positive integer, or as `MemoryPlan`.
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
        plan = MemoryPlan(identity, num_blocks=num_blocks, layout=layout, rank=rank)
        self.identity = identity
        self.num_blocks = num_blocks
        self.layout = layout
        self.rank = rank
        allocation = device.allocate(plan.storage_sizes)
        self.arena = allocation.arena
        tensors = [_view(allocation.storages, plan, room) for room in range(plan.num_rooms)]
        tensor_of_layer = {
            group.layers[index]: tensor
            for group, share in zip(identity.groups, plan.held, strict=True)
            for index, tensor in zip(share.layers, tensors, strict=False)
        }
        self.layers = [tensor_of_layer[layer] for layer in sorted(tensor_of_layer)]
        self.groups = plan.groups(
            device, [device.as_bytes(storage) for storage in allocation.storages]
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


def _view(storages: list[torch.Tensor], plan: MemoryPlan, room: int) -> torch.Tensor:
    """Return the room for a layer as a tensor of the plan's shape, a head's values last."""
    strides, dtype = plan.strides, plan.kv_dtype
    steps = (strides.side_step, strides.block_step, strides.token_step, strides.head_step)
    return torch.as_strided(
        storages[strides.storage(room)].view(dtype),
        plan.shape,
        [*(step // dtype.itemsize for step in steps), 1],
        strides.offset(layer=room) // dtype.itemsize,
    )
