"""The KV tensors of one rank: one raw allocation per layer, viewed as blocks and as bytes."""

from typing import Self

import torch

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import Identity
from kvferry.worker.device import Device
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


class KvMemory:
    """KV memory of `num_blocks` blocks (the null block 0 included) on one device.

    `layers[i]` is layer i's tensor of shape
    [2 (K, V), num_blocks, block_tokens, num_kv_heads, head_size]; slot s of the slot mapping is
    token `s % block_tokens` of block `s // block_tokens`. `byte_layers[i]` is the same memory as
    the device's bytes, of shape [2, num_blocks, page_bytes / 2].

    Raises:
        ConfigError: a size that is not a positive integer, an unknown dtype, a page too large to
            be sent.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_blocks: int,
        block_tokens: int,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
    ) -> None:
        sizes = {
            "num_blocks": num_blocks,
            "block_tokens": block_tokens,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
        }
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ConfigError(f"{name} must be a positive integer", given=size, allowed=">= 1")
        kv_dtype = torch_dtype(dtype)
        self.device = device
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        half_page_bytes = block_tokens * num_kv_heads * head_size * kv_dtype.itemsize
        self.geometry = Geometry(
            num_layers=num_layers, page_bytes=2 * half_page_bytes, block_tokens=block_tokens
        )
        raw_layers = [
            device.allocate(2 * num_blocks * half_page_bytes).view(2, num_blocks, half_page_bytes)
            for _ in range(num_layers)
        ]
        self.layers = [
            raw.view(kv_dtype).view(2, num_blocks, block_tokens, num_kv_heads, head_size)
            for raw in raw_layers
        ]
        self.byte_layers = [device.as_bytes(raw) for raw in raw_layers]

    @classmethod
    def for_identity(
        cls, device: Device, identity: Identity, *, num_blocks: int, block_tokens: int
    ) -> Self:
        """Return memory for blocks of what the identity describes.

        Raises:
            ConfigError: as the constructor.
        """
        return cls(
            device,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_layers=identity.num_layers,
            num_kv_heads=identity.num_kv_heads,
            head_size=identity.head_size,
            dtype=identity.kv_dtype,
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.geometry.num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        return self.geometry.page_bytes
