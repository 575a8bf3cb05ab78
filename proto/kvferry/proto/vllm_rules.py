"""What vLLM refuses to start, of a layout of kind vllm and a model; each with the rule that failed.

Rules about the sizes alone are in `Layout`. The others are two: which kinds of layers may be dealt,
and that dcp takes ranks that tensor parallelism would let hold copies of a KV head. A layout that
only breaks the second has a well-defined place for every token, so plans can be made with it.
"""

from collections.abc import Sequence
from typing import Any

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout
from kvferry.proto.placement import KvShape


def require_vllm_starts(layout: Layout, groups: Sequence[KvShape]) -> None:
    """Refuse a layout of kind vllm that vLLM would not start with; of other kinds none.

    Args:
        layout: the layout.
        groups: what is cached of a token in each group of the model.

    Raises:
        ConfigError: naming the rule, with both values.
    """
    require_dealable_kinds(layout, groups)
    require_copies_for_dcp(layout, groups)


def require_dealable_kinds(layout: Layout, groups: Sequence[KvShape]) -> None:
    """Refuse a model whose kinds of layers vLLM does not combine with dcp or pcp.

    Raises:
        ConfigError: a window, a chunk or (0.17) a state dealt over ranks, or several kinds that
            cannot be combined with them.
    """
    if layout.kind != "vllm":
        return
    kinds = [shape.group_kind for shape in groups]
    states_fit = layout.profile == "0.32" and layout.pcp == 1
    for kind in kinds:
        if layout.token_shards > 1 and kind != "full" and not (kind == "mamba" and states_fit):
            raise ConfigError(
                f"vLLM deals no tokens of layers of kind {kind} over ranks",
                given=_axes(layout),
                allowed={"kind": "full", "otherwise token_shards": 1},
            )
    fit = all(kind == "full" or (kind == "mamba" and states_fit) for kind in kinds)
    if layout.profile == "0.17":
        fit = len(set(kinds)) == 1
    if len(kinds) > 1 and max(layout.dcp, layout.pcp) > 1 and not fit:
        raise ConfigError(
            "vLLM does not combine context parallelism with groups of these kinds",
            given={"kinds": kinds, **_axes(layout)},
            allowed={"dcp": 1, "pcp": 1},
        )


def require_copies_for_dcp(layout: Layout, groups: Sequence[KvShape]) -> None:
    """Refuse a dcp that takes more ranks than would hold copies of a KV head.

    Raises:
        ConfigError: tp not above the number of KV heads, a dcp above the copies of a head, or one
            that does not divide the query heads of a KV head.
    """
    if layout.kind != "vllm" or layout.dcp == 1:
        return
    for shape in groups:
        heads, tp = shape.num_kv_heads, layout.tp
        if not shape.mla and tp <= heads:
            raise ConfigError(
                "with dcp, tp must be above the number of KV heads",
                given={"tp": tp, "dcp": layout.dcp},
                allowed={"num_kv_heads": heads},
            )
        if not shape.mla and layout.dcp > tp // heads:
            raise ConfigError(
                "dcp must be at most the number of ranks that tp gives each KV head",
                given={"dcp": layout.dcp},
                allowed={"tp // num_kv_heads": tp // heads},
            )
        query_heads = shape.num_query_heads // heads
        if not shape.mla and query_heads % layout.dcp:
            raise ConfigError(
                "dcp must divide the number of query heads of a KV head",
                given={"dcp": layout.dcp},
                allowed={"query heads of a KV head": query_heads},
            )


def _axes(layout: Layout) -> dict[str, Any]:
    return {"profile": layout.profile, "dcp": layout.dcp, "pcp": layout.pcp}
