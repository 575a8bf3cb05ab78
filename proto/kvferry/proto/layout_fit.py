"""Whether the ranks of a layout can hold the cache of a model."""

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import GroupId
from kvferry.proto.layout import Layout
from kvferry.proto.placement import holdings, require_full_where_dealt, shape_of
from kvferry.proto.shared_chain import hashes_per_block
from kvferry.proto.vllm_rules import require_vllm_starts


def require_layout_fits(
    layout: Layout, identity: Identity, *, hash_block_tokens: int, who: str
) -> None:
    """Refuse a layout that a model cannot be cached in.

    Raises:
        ConfigError: saying `who` and naming the rule: a virtual block that is no multiple of a
            hash, stages or head shards that do not fit the model, tokens of windows, chunks or
            states dealt over ranks, or (kind vllm) what vLLM would not start with.
    """
    groups = [shape_of(identity, GroupId(group_id)) for group_id in range(len(identity.groups))]
    try:
        hashes_per_block(layout.virtual_block_tokens, hash_block_tokens)
        for shape in groups:
            holdings(layout, shape)
        require_vllm_starts(layout, groups)
        require_full_where_dealt(layout, groups)
    except ConfigError as error:
        raise ConfigError(
            f"{who}: {error.message}", given=error.given, allowed=error.allowed
        ) from error
