"""Values that many tests need and hardly any cares about in full: say what matters, no more."""

from dataclasses import replace
from typing import Any

from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import InstanceInfo


def make_identity(
    *, num_layers: int = 1, groups: tuple[GroupSpec, ...] = (), **changes: Any
) -> Identity:
    """An identity of one full group of `num_layers` layers, or of as many as `groups` have."""
    groups = groups or (GroupSpec(kind="full", layers=tuple(range(num_layers))),)
    values: dict[str, Any] = {
        "model": "tiny",
        "weight_version": "1",
        "weight_dtype": "float32",
        "kv_dtype": "float32",
        "kv_scales": "",
        "rope": "",
        "num_layers": sum(len(group.layers) for group in groups),
        "num_kv_heads": 1,
        "head_size": 8,
        "groups": groups,
    }
    return Identity(**(values | changes))


def make_info(name: str = "decode-0", *, block_tokens: int = 4, **changes: Any) -> InstanceInfo:
    """A decode instance that has registered; the scheme is that of its block."""
    info = InstanceInfo(
        instance_id=InstanceId(name),
        role="decode",
        incarnation=Incarnation(1),
        identity=make_identity(),
        scheme=make_scheme(hash_block_tokens=block_tokens),
        layout=Layout(block_tokens=block_tokens),
        num_blocks=10,
        rank_addresses=(f"127.0.0.1:{name}",),
        max_model_len=1000,
        rank_pids=(1,),
        version="0.1.0",
    )
    return replace(info, **changes)
