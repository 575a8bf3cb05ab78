"""What `kvferry status` tells of a service: one JSON object, or tables."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.proto.identity import Identity
from kvferry.proto.layout_text import layout_text
from kvferry.proto.messages import Description, InstanceStatus

SHORT_DIGEST = 8


def to_json(description: Description) -> dict[str, Any]:
    """Return the service as it is now; counts of blocks leave the null block out."""
    scheme = description.scheme
    return {
        "epoch": description.epoch,
        "scheme": {
            "algorithm": scheme.algorithm,
            "key_format": scheme.key_format,
            "hash_block_tokens": scheme.hash_block_tokens,
            "none_hash": scheme.none_hash.hex(),
        },
        "identities": [_identity(identity) for identity in _identities(description)],
        "instances": [_instance(status) for status in description.instances],
        "leases": description.num_leases,
        "handoffs": description.num_handoffs,
        "counters": dict(sorted(description.counters.items())),
    }


def print_tables(description: Description, out: Console) -> None:
    """Print the same for people, without the counters that are 0."""
    scheme = description.scheme
    out.print(
        f"epoch {description.epoch}, {scheme.hash_block_tokens} tokens per {scheme.algorithm} hash",
        markup=False,
    )
    identities = Table("model", "weights", "KV dtype", "identity", box=SIMPLE_HEAD)
    for one in _identities(description):
        identities.add_row(one.model, one.weight_version, one.kv_dtype, _short(one))
    instances = Table(
        "instance", "role", "identity", "address", "used", "cached", "total", "fill",
        "requests", "hit tokens", box=SIMPLE_HEAD,
    )  # fmt: skip
    for status in description.instances:
        shown = _instance(status)
        instances.add_row(
            shown["id"],
            shown["role"],
            _short(status.info.identity),
            ", ".join(shown["addresses"]),
            *(str(shown[name]) for name in ("used_blocks", "cached_blocks", "total_blocks")),
            f"{shown['fill']:.0%}",
            str(shown["requests"]),
            str(shown["local_hit_tokens"] + shown["remote_hit_tokens"]),
        )
    out.print(identities)
    out.print(instances)
    counted = [f"{name} {n}" for name, n in sorted(description.counters.items()) if n]
    out.print(", ".join(counted), markup=False)


def _identities(description: Description) -> list[Identity]:
    return list(dict.fromkeys(status.info.identity for status in description.instances))


def _identity(identity: Identity) -> dict[str, Any]:
    return {
        "digest": identity.digest().hex(),
        "model": identity.model,
        "weight_version": identity.weight_version,
        "weight_dtype": identity.weight_dtype,
        "kv_dtype": identity.kv_dtype,
    }


def _instance(status: InstanceStatus) -> dict[str, Any]:
    info, first = status.info, status.stats.first
    total = info.num_blocks - 1
    return {
        "id": info.instance_id,
        "role": info.role,
        "identity": info.identity.digest().hex(),
        "addresses": list(info.rank_addresses),
        "layout": layout_text(info.layout),
        "used_blocks": status.num_used_blocks,
        "cached_blocks": status.num_cached_blocks,
        "leased_blocks": status.held.leased_blocks,
        "total_blocks": total,
        "fill": status.num_cached_blocks / total,
        "requests": status.num_requests,
        "requested_tokens": first.requested,
        "local_hit_tokens": first.local_hit,
        "remote_hit_tokens": first.remote_hit,
        "version": info.version,
    }


def _short(identity: Identity) -> str:
    return identity.digest().hex()[:SHORT_DIGEST]
