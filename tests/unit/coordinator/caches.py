"""Cache managers and their specs in the words of the tests."""

from typing import Any, TypeVar

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.proto.specs import FullSpec, LayerSpec, MambaSpec

Spec = TypeVar("Spec", bound=LayerSpec)


def spec_of(kind: type[Spec], **settings: Any) -> Spec:
    """Of the least bytes, where sizes do not matter; blocks of 4 tokens unless told."""
    sizes: dict[str, Any] = {"kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    if issubclass(kind, MambaSpec):
        sizes = {"shapes": ((1,),), "dtypes": ("float32",)}
    return kind(**{"block_tokens": 4, **sizes, **settings})


def full_cache(
    num_blocks: int, block_tokens: int, max_model_len: int, **changes: Any
) -> CacheManager:
    """One group of full attention, on one rank, with the decisions of today."""
    return cache_of(
        spec_of(FullSpec, block_tokens=block_tokens),
        num_blocks=num_blocks,
        hash_block_tokens=block_tokens,
        max_model_len=max_model_len,
        **changes,
    )


def cache_of(*groups: LayerSpec, **settings: Any) -> CacheManager:
    """Any groups; 100 blocks, hashes of 4 tokens and 1,000 tokens a request unless told."""
    sizes = {"num_blocks": 100, "hash_block_tokens": 4, "max_model_len": 1000}
    return CacheManager(CacheConfig(groups=groups, **{**sizes, **settings}))
