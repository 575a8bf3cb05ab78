"""Between an engine's own KV tensors and blocks that travel.

An engine's tensors have, per layer, the shape [2 (K, V), num_tokens, num_kv_heads, head_size].
Blocks pass through a small KV memory of their own, so a transfer that fails half-way through a
block never shows in the engine's tensors, and a long prefix needs no second copy of itself.
"""

from collections.abc import Sequence

import torch

from kvferry.proto.errors import BadInputError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import BlockId
from kvferry.proto.layout import Layout
from kvferry.worker.device import open_device
from kvferry.worker.dtypes import require_pages
from kvferry.worker.kv_memory import KvMemory

MAX_STAGING_BYTES = 64 << 20


class Staging:
    """Room on the CPU for some blocks of one identity, at most `num_blocks` and about 64 MiB.

    Raises:
        ConfigError: a KV dtype or a kind of group that cannot be moved.
    """

    def __init__(self, identity: Identity, *, block_tokens: int, num_blocks: int) -> None:
        block_bytes = identity.block_bytes(block_tokens)
        self.num_blocks = max(1, min(num_blocks, MAX_STAGING_BYTES // block_bytes))
        self._block_tokens = block_tokens
        # Block 0 is the null block here as everywhere.
        self.memory = KvMemory(
            open_device("cpu"),
            identity,
            num_blocks=self.num_blocks + 1,
            layout=Layout(block_tokens=block_tokens),
        )

    def block_ids(self, count: int) -> list[BlockId]:
        """Return the first so many blocks of the staging memory."""
        return [BlockId(index) for index in range(1, count + 1)]

    @torch.no_grad()
    def fill(
        self, layers: Sequence[torch.Tensor], group: GroupSpec, first_block: int, num_blocks: int
    ) -> None:
        """Copy blocks [first_block, first_block + num_blocks) of a group's layers in."""
        for staged, layer in self._pairs(layers, group, first_block, num_blocks):
            staged.copy_(layer)

    @torch.no_grad()
    def empty(
        self, into: Sequence[torch.Tensor], group: GroupSpec, first_block: int, num_blocks: int
    ) -> None:
        """Copy the first staged blocks to a group's layers, from `first_block` on."""
        for staged, layer in self._pairs(into, group, first_block, num_blocks):
            layer.copy_(staged)

    def _pairs(
        self, layers: Sequence[torch.Tensor], group: GroupSpec, first_block: int, num_blocks: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size = self._block_tokens
        start, end = first_block * size, (first_block + num_blocks) * size
        # Splitting one axis is a view of any tensor, however it lies in memory.
        return [
            (
                self.memory.layers[index][:, 1 : num_blocks + 1],
                layers[index][:, start:end].view(2, num_blocks, size, *layers[index].shape[2:]),
            )
            for index in group.layers
        ]


def require_layers(
    layers: Sequence[torch.Tensor], identity: Identity, *, num_tokens: int, who: str
) -> None:
    """Refuse tensors that are not the KV tensors of `num_tokens` or more tokens of the identity.

    Raises:
        BadInputError: no sequence, another number of layers, or (naming the layer) another shape or
            dtype, or a tensor without bytes of its own; or (ConfigError) the identity's KV dtype
            or a kind of its groups cannot be moved.
    """
    dtype = require_pages(identity)
    if not isinstance(layers, Sequence):
        raise BadInputError(
            f"{who} must be a sequence of tensors",
            given=type(layers).__name__,
            allowed="a list or tuple with one tensor per layer",
        )
    if len(layers) != identity.num_layers:
        raise BadInputError(
            f"{who} must hold one tensor per layer", given=len(layers), allowed=identity.num_layers
        )
    for index, layer in enumerate(layers):
        if not isinstance(layer, torch.Tensor):
            raise BadInputError(
                f"{who}[{index}] is no tensor", given=type(layer).__name__, allowed="torch.Tensor"
            )
        shape = tuple(layer.shape)
        wanted = (2, num_tokens, identity.num_kv_heads, identity.head_size)
        fits = len(shape) == 4 and shape[:1] + shape[2:] == wanted[:1] + wanted[2:]
        if not fits or shape[1] < num_tokens:
            raise BadInputError(
                f"{who}[{index}] has a wrong shape",
                given=list(shape),
                allowed=f"[2, at least {num_tokens}, {wanted[2]}, {wanted[3]}]",
            )
        if layer.dtype != dtype:
            raise BadInputError(
                f"{who}[{index}] has a wrong dtype",
                given=str(layer.dtype).removeprefix("torch."),
                allowed=identity.kv_dtype,
            )
        if layer.is_meta or layer.layout != torch.strided:
            raise BadInputError(
                f"{who}[{index}] has no dense bytes",
                given=f"{layer.layout} on {layer.device}",
                allowed="torch.strided on a device with memory",
            )


def require_writable(layers: Sequence[torch.Tensor], *, who: str) -> None:
    """Refuse tensors (that `require_layers` took) which could not all hold bytes of their own.

    Raises:
        BadInputError: naming the layer, an inference tensor outside of inference mode, a tensor
            whose elements share memory, or one tensor for two layers.
    """
    layer_at: dict[int, int] = {}
    for index, layer in enumerate(layers):
        if layer.is_inference() and not torch.is_inference_mode_enabled():
            raise BadInputError(
                f"{who}[{index}] cannot be written to",
                given="an inference tensor",
                allowed="a normal tensor, or a call inside torch.inference_mode()",
            )
        if _shares_memory_with_itself(layer):
            raise BadInputError(
                f"elements of {who}[{index}] share memory",
                given=f"strides {list(layer.stride())} of shape {list(layer.shape)}",
                allowed="one place per element",
            )
        if layer.numel() and layer_at.setdefault(layer.data_ptr(), index) != index:
            raise BadInputError(
                f"{who}[{index}] is the tensor of another layer",
                given=f"the memory of {who}[{layer_at[layer.data_ptr()]}]",
                allowed="one tensor per layer",
            )


def _shares_memory_with_itself(layer: torch.Tensor) -> bool:
    """Tell by the strides; layouts that interleave their axes count as sharing."""
    reach = 0
    for stride, size in sorted(zip(layer.stride(), layer.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
