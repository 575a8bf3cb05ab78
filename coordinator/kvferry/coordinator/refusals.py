"""Why a cache refuses a setting or a call: a neutral code beside the numbers.

The codes are those of the recorded data, so that a refusal can be compared with vLLM's; one that
vLLM leaves unnamed has a name here.
"""

from typing import Any, Literal

from kvferry.proto.errors import BadInputError, ConfigError

Reason = Literal[
    "hash_unit_must_equal_block",
    "block_not_multiple_of_hash_unit",
    "context_parallel_with_hybrid",
    "context_parallel_with_sliding_window",
    "context_parallel_with_chunked_local",
    "context_parallel_with_mamba",
    "hybrid_needs_two_distinct_kinds",
    "eagle_with_chunked_local",
    "eagle_with_mixed_blocks",
    "chunked_local_needs_common_block",
    "cross_attention_lookup",
    "nothing_to_allocate",
    "unknown_block_id",
    "retention_without_sparse_kind",
    "retention_not_multiple",
    "kind_not_constructible",
    "sink_not_multiple_of_block",
]


def config_refused(reason: Reason, message: str, *, allowed: Any, **given: Any) -> ConfigError:
    """Return the error for a configuration that can never work; `given` starts with the reason."""
    return ConfigError(message, given={"reason": reason, **given}, allowed=allowed)


def call_refused(reason: Reason, message: str, *, allowed: Any, **given: Any) -> BadInputError:
    """Return the error for a call that can never work; `given` starts with the reason."""
    return BadInputError(message, given={"reason": reason, **given}, allowed=allowed)
