"""Whether an instance may join: its scheme, identity, layout, pool size and version."""

from collections.abc import Iterable

from kvferry.proto.errors import ConfigError, MismatchError
from kvferry.proto.identity import Identity, require_equal_identities
from kvferry.proto.layout_fit import require_layout_fits
from kvferry.proto.messages import InstanceInfo
from kvferry.proto.scheme import HashScheme, require_equal_schemes


def check_registration(
    info: InstanceInfo,
    *,
    scheme: HashScheme,
    expected_identity: Identity | None,
    members: Iterable[InstanceInfo],
) -> None:
    """Refuse an instance that could not work with this service.

    Raises:
        SchemeMismatchError, IdentityMismatchError: naming each differing field with both values.
        MismatchError: another kvferry version than a member of the service.
        ConfigError: a layout, pool size or length that cannot work; naming what would.

    """
    who = f"instance {info.instance_id}"
    require_equal_schemes(scheme, info.scheme, who=who)
    if expected_identity is not None:
        require_equal_identities(expected_identity, info.identity, who=who)
    require_layout_fits(
        info.layout, info.identity, hash_block_tokens=scheme.hash_block_tokens, who=who
    )
    _require_ranks_told(info, who)
    if info.role == "store":
        _require_hash_blocks(info, who)
    for group in info.identity.groups:
        if group.chunk_tokens is not None and group.chunk_tokens % info.layout.virtual_block_tokens:
            raise ConfigError(
                f"{who}: the chunks of local attention must be whole blocks",
                given={"chunk_tokens": group.chunk_tokens},
                allowed=f"a multiple of {info.layout.virtual_block_tokens}",
            )
    _require_sizes(info, who)
    for member in members:
        if member.instance_id != info.instance_id and member.version != info.version:
            raise MismatchError(
                f"{who} runs another kvferry version than {member.instance_id}",
                given={"version": info.version},
                allowed={"version": member.version},
            )


def _require_sizes(info: InstanceInfo, who: str) -> None:
    if type(info.num_blocks) is not int or info.num_blocks < 2:
        raise ConfigError(
            f"{who}: num_blocks must leave a block beside the null block",
            given=repr(info.num_blocks),
            allowed="an integer >= 2",
        )
    if type(info.max_in_flight_tokens) is not int or info.max_in_flight_tokens < 0:
        raise ConfigError(
            f"{who}: max_in_flight_tokens",
            given=repr(info.max_in_flight_tokens),
            allowed="an integer >= 0",
        )
    shortest = 0 if info.role == "store" else 1
    if type(info.max_model_len) is not int or info.max_model_len < shortest:
        raise ConfigError(
            f"{who}: max_model_len in tokens",
            given=repr(info.max_model_len),
            allowed=f"an integer >= {shortest}",
        )


def _require_ranks_told(info: InstanceInfo, who: str) -> None:
    optional = [name for name in ("rank_metrics", "rank_nodes") if getattr(info, name)]
    for name in ("rank_addresses", "rank_pids", *optional):
        if len(getattr(info, name)) != info.layout.num_ranks:
            raise ConfigError(
                f"{who}: {name} must tell of every rank of the layout",
                given={name: len(getattr(info, name))},
                allowed={"num_ranks": info.layout.num_ranks},
            )


def _require_hash_blocks(info: InstanceInfo, who: str) -> None:
    """Refuse a store that could not take what clients store: whole hash blocks, one by one."""
    layout = info.layout
    if layout.virtual_block_tokens != info.scheme.hash_block_tokens or layout.num_ranks != 1:
        raise ConfigError(
            f"{who}: a store has one rank, and its blocks are hash blocks",
            given={
                "virtual_block_tokens": layout.virtual_block_tokens,
                "num_ranks": layout.num_ranks,
            },
            allowed={"virtual_block_tokens": info.scheme.hash_block_tokens, "num_ranks": 1},
        )


def require_same_member(known: InstanceInfo, other: InstanceInfo) -> None:
    """Refuse a second process under the name and incarnation of a live instance.

    Raises:
        MismatchError: naming each differing field with the newcomer's value and the known one's.

    """
    names = [
        name
        for name in InstanceInfo.__dataclass_fields__
        if getattr(known, name) != getattr(other, name)
    ]
    if names:
        raise MismatchError(
            f"instance {known.instance_id} is registered by another live process",
            given={name: str(getattr(other, name)) for name in names},
            allowed={name: str(getattr(known, name)) for name in names},
        )
