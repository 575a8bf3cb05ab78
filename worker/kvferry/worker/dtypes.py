"""The dtypes of KV memory, and which layers keep keys and values in it."""

import torch

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import Identity

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
    if identity.kv_dtype not in TORCH_DTYPES:
        raise ConfigError(
            "unsupported KV dtype", given=identity.kv_dtype, allowed=sorted(TORCH_DTYPES)
        )
    return TORCH_DTYPES[identity.kv_dtype]
