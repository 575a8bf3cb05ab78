"""An engine's own paged KV tensors, seen in one form whatever order they lie in."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch

from kvferry.proto.errors import ConfigError
from kvferry.worker.arena import HostBytes
from kvferry.worker.device import open_device
from kvferry.worker.group_memory import HostLayer

PagedLayer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_tokens, heads, head_size]."""


_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


NUM_COPIERS = 2


class PagedTensors:
    """The layers of one rank of an engine.

    Tokens are counted as the rank holds them, from the sequence's first: token t lies in the
    sequence's block `t // block_tokens`.

    Args:
        layers: views of the engine's memory, in the order of the identity's layers.

    Raises:
        ConfigError: a layer on a device that is not supported.
    """

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        self.layers = tuple(layers)
        keys, _ = self.layers[0]
        self.block_tokens = keys.shape[1]
        self.dtype = keys.dtype
        self._on = keys.device
        self._device = open_device(str(keys.device))
        # One core does not use up the memory's bandwidth, and the request waits for all of it.
        self._copiers = ThreadPoolExecutor(NUM_COPIERS, thread_name_prefix="kvferry-copy")

    @torch.no_grad()
    def read(
        self, into: Sequence[torch.Tensor], block_ids: Sequence[int], first_token: int
    ) -> None:
        """Copy tokens from `first_token` on, counted from the first of the blocks, to `into`.

        Args:
            into: per layer [2 (K, V), blocks, tokens, heads, head_size] of any block size; says how
                many.
            block_ids: the engine's blocks that hold the tokens, in the sequence's order.
            first_token: where to begin.
        """
        with self._copies():
            ids = torch.tensor(block_ids, device=self._on)
            for layer, targets in zip(self.layers, into, strict=True):
                for side, target in zip(layer, targets, strict=True):
                    tokens = side.index_select(0, ids).flatten(0, 1)
                    end = first_token + target.shape[0] * target.shape[1]
                    target.copy_(tokens[first_token:end].reshape(target.shape))

    @torch.no_grad()
    def write(
        self, source: Sequence[HostLayer], source_ids: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """Overwrite whole blocks with the same tokens in blocks of another size.

        Args:
            source: this rank's layers in memory of the host.
            source_ids: blocks of it, in the sequence's order.
            block_ids: the engine's blocks, as many as the tokens fill.
        """
        chosen = _index(source_ids)
        halves = [
            (side, blocks)
            for layer, given in zip(self.layers, source, strict=True)
            for side, blocks in zip(layer, given, strict=True)
        ]
        with self._copies():
            if self._on.type == "cpu":
                list(
                    self._copiers.map(
                        lambda half: self._put_on_host(half[0], block_ids, half[1][chosen]), halves
                    )
                )
            else:
                for side, blocks in halves:
                    self._put_on_device(side, block_ids, blocks[chosen])

    def _put_on_host(self, side: torch.Tensor, block_ids: Sequence[int], blocks: HostBytes) -> None:
        """Copy once, without the interpreter's lock."""
        # To numpy the values are whole numbers of their size: it does not know all of torch's.
        number = _INTEGER_OF_BYTES[self.dtype.itemsize]
        values = blocks.view(np.dtype(f"i{self.dtype.itemsize}"))
        shape = (side.shape[0], -1, *values.shape[1:])
        parts = side.view(number).view(shape).numpy()
        parts[_index(block_ids)] = values.reshape(len(block_ids), *parts.shape[1:])

    def _put_on_device(
        self, side: torch.Tensor, block_ids: Sequence[int], blocks: HostBytes
    ) -> None:
        # Memory of others cannot be written, and torch wants no such array.
        host = torch.from_numpy(np.require(blocks, requirements=("C", "W"))).view(self.dtype)
        tokens = host.reshape(len(block_ids), *side.shape[1:]).to(self._on)
        side.index_copy_(0, torch.tensor(block_ids, device=self._on), tokens)

    def queued(self) -> Callable[[], None]:
        """Return what waits until the work that the calling thread has queued so far is done."""
        return self._device.queued()

    def _copies(self) -> AbstractContextManager[None]:
        return self._device.copies()


def _index(ids: Sequence[int]) -> slice | npt.NDArray[np.int64]:
    """Return what takes the items of these numbers out of an array.

    Blocks handed out at once mostly lie one after the other, or backwards where those of a freed
    request are used again. As a slice they are copied at once, otherwise one by one.
    """
    step = 1 if ids[0] <= ids[-1] else -1
    end = ids[-1] + step
    if list(ids) == list(range(ids[0], end, step)):
        return slice(ids[0], end if end >= 0 else None, step)
    return np.array(ids, dtype=np.int64)


def of_accelerator(
    tensor: torch.Tensor, *, block_tokens: int, num_heads: int, head_size: int
) -> PagedLayer:
    """Return a layer as vLLM's backends for accelerators have it, not copied.

    In blocks of [heads, tokens, K and V] (all backends of 0.32), [2, blocks, tokens, heads,
    head_size] (FlashAttention before that), or [blocks, 2, tokens, heads, head_size] (FlashInfer,
    Triton); with whatever strides.

    Raises:
        ConfigError: another shape, or one that could be either of two.
    """
    rest = (block_tokens, num_heads, head_size)
    shape = tuple(tensor.shape)
    if len(shape) == 4 and shape[1:] == (num_heads, block_tokens, 2 * head_size):
        tokens = tensor.transpose(1, 2)
        return tokens[..., :head_size], tokens[..., head_size:]
    if len(shape) == 5 and shape[2:] == rest:
        if shape[0] == 2 and shape[1] != 2:
            return tensor[0], tensor[1]
        if shape[1] == 2 and shape[0] != 2:
            return tensor[:, 0], tensor[:, 1]
    raise ConfigError(
        "KV tensors in an order that is not known",
        given=list(shape),
        allowed=[
            f"[blocks, {num_heads}, {block_tokens}, {2 * head_size}]",
            f"[2, blocks, {block_tokens}, {num_heads}, {head_size}]",
            f"[blocks, 2, {block_tokens}, {num_heads}, {head_size}]",
        ],
    )


def of_cpu(
    tensor: torch.Tensor, *, block_tokens: int, num_heads: int, head_size: int
) -> PagedLayer:
    """Return a layer as vLLM's kernels for CPUs have it, not copied.

    The tensor says [blocks, heads, tokens, 2 * head_size], but of each head the keys come first, as
    [head_size, tokens], and then the values as [tokens, head_size] (seen in vLLM 0.32 with the
    instruction sets "vec" and "vec16"; AMX, for bfloat16, packs the keys in tiles).

    Raises:
        ConfigError: another shape, not contiguous, or bfloat16.
    """
    shape = tuple(tensor.shape)
    if shape[1:] != (num_heads, block_tokens, 2 * head_size) or not tensor.is_contiguous():
        raise ConfigError(
            "KV tensors in an order that is not known",
            given={"shape": list(shape), "strides": list(tensor.stride())},
            allowed=f"contiguous [blocks, {num_heads}, {block_tokens}, {2 * head_size}]",
        )
    if tensor.dtype == torch.bfloat16:
        raise ConfigError(
            "on a CPU, blocks of bfloat16 may lie in tiles, which are not known here",
            given="bfloat16",
            allowed=["float32", "float16"],
        )
    heads = tensor.view(shape[0], num_heads, 2, block_tokens * head_size)
    keys = heads[:, :, 0].view(shape[0], num_heads, head_size, block_tokens)
    values = heads[:, :, 1].view(shape[0], num_heads, block_tokens, head_size)
    return keys.permute(0, 3, 1, 2), values.transpose(1, 2)
