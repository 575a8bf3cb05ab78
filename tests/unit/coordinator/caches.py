"""Cache managers in the words of the tests."""

from typing import Any

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.cache_specs import CacheSpec, FullSpec


def full_cache(
    num_blocks: int, block_tokens: int, max_model_len: int, **changes: Any
) -> CacheManager:
    """One group of full attention, on one rank, with the decisions of today."""
    return cache_of(
        FullSpec(block_tokens=block_tokens),
        num_blocks=num_blocks,
        hash_block_tokens=block_tokens,
        max_model_len=max_model_len,
        **changes,
    )


def cache_of(*groups: CacheSpec, **settings: Any) -> CacheManager:
    """Any groups; 100 blocks, hashes of 4 tokens and 1,000 tokens a request unless told."""
    sizes = {"num_blocks": 100, "hash_block_tokens": 4, "max_model_len": 1000}
    return CacheManager(CacheConfig(groups=groups, **{**sizes, **settings}))
