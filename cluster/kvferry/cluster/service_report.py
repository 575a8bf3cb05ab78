"""What `kvferry status` tells of a service: one JSON object, or tables."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cluster.engine_info import AttachedEngine
from kvferry.proto.identity import Identity, identity_to_plain
from kvferry.proto.layout_text import layout_text
from kvferry.proto.messages import Description, InstanceStatus

SHORT_DIGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service at one moment; `engines` by the `host:port` of the node they attached to."""

    description: Description
    engines: dict[str, tuple[AttachedEngine, ...]]


def to_json(status: ServiceStatus) -> dict[str, Any]:
    """Return the service as it is now; counts of blocks leave the null block out.

    `cannot_share` has a row for each two identities of one model, with the fields in which they
    differ.
    """
    description = status.description
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
        "instances": [_instance(one) for one in description.instances],
        "engines": [
            _engine(one, node) for node, engines in status.engines.items() for one in engines
        ],
        "cannot_share": _differences(_identities(description)),
        "leases": description.num_leases,
        "handoffs": description.num_handoffs,
        "counters": dict(sorted(description.counters.items())),
    }


def print_tables(status: ServiceStatus, out: Console) -> None:
    """Print the same for people, without the counters that are 0."""
    description = status.description
    scheme = description.scheme
    out.print(
        f"epoch {description.epoch}, {scheme.hash_block_tokens} tokens per {scheme.algorithm} hash",
        markup=False,
    )
    identities = Table("model", "weights", "KV dtype", "identity", box=SIMPLE_HEAD)
    for identity in map(_identity, _identities(description)):
        identities.add_row(
            identity["model"],
            identity["weight_version"],
            identity["kv_dtype"],
            _short(identity["digest"]),
        )
    instances = Table(
        "instance", "role", "state", "identity", "address", "used", "cached", "total", "fill",
        "requests", "hit tokens", box=SIMPLE_HEAD,
    )  # fmt: skip
    for one in description.instances:
        shown = _instance(one)
        instances.add_row(
            shown["id"],
            shown["role"],
            shown["state"],
            _short(shown["identity"]),
            ", ".join(shown["addresses"]),
            *(str(shown[name]) for name in ("used_blocks", "cached_blocks", "total_blocks")),
            f"{shown['fill']:.0%}",
            str(shown["requests"]),
            str(shown["local_hit_tokens"] + shown["remote_hit_tokens"]),
        )
    engines = Table("engine", "node", "identity", "layout", "version", "seen", box=SIMPLE_HEAD)
    for node, attached in status.engines.items():
        for shown in (_engine(one, node) for one in attached):
            engines.add_row(
                shown["id"],
                node,
                _short(shown["identity"]),
                shown["layout"],
                shown["version"],
                f"{shown['seen_s']:.0f} s ago",
            )
    for table in (identities, instances, engines):
        out.print(table)
    for row in _differences(_identities(description)):
        names = " and ".join(_short(digest) for digest in row["identities"])
        why = ", ".join(
            f"{field} {ours} / {theirs}" for field, (ours, theirs) in row["differing"].items()
        )
        out.print(f"{row['model']}: {names} cannot share: {why}", markup=False)
    counted = [f"{name} {n}" for name, n in sorted(description.counters.items()) if n]
    out.print(", ".join(counted), markup=False)


def _identities(description: Description) -> list[Identity]:
    return list(dict.fromkeys(status.info.identity for status in description.instances))


def _differences(identities: list[Identity]) -> list[dict[str, Any]]:
    """Return which two identities of one model there are, and in what they differ."""
    return [
        {
            "model": one.model,
            "identities": [one.digest().hex(), other.digest().hex()],
            "differing": {
                name: [value, identity_to_plain(other)[name]]
                for name, value in identity_to_plain(one).items()
                if value != identity_to_plain(other)[name]
            },
        }
        for one, other in combinations(identities, 2)
        if one.model == other.model
    ]


def _engine(one: AttachedEngine, node: str) -> dict[str, Any]:
    return {
        "id": one.engine.engine_id,
        "node": node,
        "identity": one.identity_digest.hex(),
        "block_tokens": one.engine.layout.block_tokens,
        "layout": layout_text(one.engine.layout),
        "version": one.engine.version,
        "seen_s": one.seen_s,
    }


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
        "state": status.state,
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


def _short(digest: str) -> str:
    return digest[:SHORT_DIGEST]
