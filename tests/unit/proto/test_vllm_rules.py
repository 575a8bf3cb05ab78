import re
from typing import Any

import pytest
from tests.builders import make_identity

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import GroupKind, GroupSpec
from kvferry.proto.ids import GroupId
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.proto.placement import (
    Holding,
    KvShape,
    holdings,
    require_full_where_dealt,
    shape_of,
)
from kvferry.proto.vllm_rules import require_vllm_starts


def shape(kv_heads: int = 2, **changes: Any) -> KvShape:
    settings: dict[str, Any] = {"num_layers": 4, "head_size": 8, "dtype": "float32"}
    return KvShape(num_kv_heads=kv_heads, **settings | changes)


def kinds(*names: GroupKind) -> list[KvShape]:
    return [shape(1, group_kind=name) for name in names]


@pytest.mark.parametrize(
    ("layout", "group", "rule"),
    [
        (
            vllm(block_tokens=4, tp=4, dcp=2),
            shape(8),
            "with dcp, tp must be above the number of KV heads; given: tp=4, dcp=2; allowed:"
            " num_kv_heads=8",
        ),
        (
            vllm(block_tokens=4, tp=8, dcp=8),
            shape(2),
            "dcp must be at most the number of ranks that tp gives each KV head; given: dcp=8;"
            " allowed: tp // num_kv_heads=4",
        ),
        (
            vllm(block_tokens=4, tp=8, dcp=4),
            shape(2, num_query_heads=12),
            "dcp must divide the number of query heads of a KV head; given: dcp=4; allowed: query"
            " heads of a KV head=6",
        ),
    ],
)
def test_vllm_deals_tokens_only_over_ranks_that_would_hold_copies(
    layout: Layout, group: KvShape, rule: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(rule)}$"):
        require_vllm_starts(layout, [group])


def test_vllm_starts_dcp_over_copies_of_a_head_and_over_all_ranks_with_mla() -> None:
    require_vllm_starts(vllm(block_tokens=4, tp=8, dcp=4), [shape(2, num_query_heads=16)])
    require_vllm_starts(vllm(block_tokens=4, tp=8, dcp=8), [shape(1, mla=True)])
    require_vllm_starts(grid(block_tokens=4, tp=4, dcp=2), kinds("full", "sliding_window"))


@pytest.mark.parametrize(
    ("groups", "axes", "refused_in"),
    [
        (["sliding_window"], {"dcp": 2}, ["0.17", "0.32"]),
        (["chunked_local"], {"dcp": 2}, ["0.17", "0.32"]),
        (["mamba"], {"dcp": 2}, ["0.17"]),
        (["sliding_window"], {"pcp": 2}, ["0.17"]),
        (["full", "sliding_window"], {"dcp": 2}, ["0.17", "0.32"]),
        (["full", "sliding_window"], {"pcp": 2}, ["0.17", "0.32"]),
        (["full", "mamba"], {"dcp": 2}, ["0.17"]),
        (["full", "full"], {"dcp": 2}, []),
        (["full"], {"pcp": 2}, []),
        (["full", "sliding_window"], {"tp": 4}, []),
    ],
)
def test_vllm_combines_context_parallelism_with_these_kinds_of_layers(
    groups: list[GroupKind], axes: dict[str, int], refused_in: list[str]
) -> None:
    for profile in ("0.17", "0.32"):
        layout = vllm(block_tokens=4, profile=profile, **{"tp": 2} | axes)  # type: ignore[arg-type]
        if profile in refused_in:
            with pytest.raises(ConfigError, match=r"^vLLM (deals no|does not combine)"):
                require_vllm_starts(layout, kinds(*groups))
        else:
            require_vllm_starts(layout, kinds(*groups))


def test_ranks_of_one_kv_head_share_its_tokens_under_vllms_dcp() -> None:
    held = holdings(vllm(block_tokens=4, tp=8, dcp=2), shape(2))
    assert [(one.heads.start, one.token_shard) for one in held] == [
        (0, 0),
        (0, 1),
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 0),
        (1, 1),
    ]


def test_a_group_is_held_by_the_stages_that_have_layers_of_it() -> None:
    group = shape(num_layers=6, group_layers=(1, 2, 5))
    held = holdings(grid(block_tokens=4, pp=3, stage_layers=(2, 3, 1)), group)
    assert [one.layers for one in held] == [range(1), range(1, 2), range(2, 3)]
    alone = holdings(grid(block_tokens=4, pp=2), shape(num_layers=4, group_layers=(2, 3)))
    assert [len(one.layers) for one in alone] == [0, 2]


def test_the_shape_of_a_group_is_that_of_the_identity() -> None:
    identity = make_identity(
        groups=(
            GroupSpec(kind="full", layers=(0,)),
            GroupSpec(kind="sliding_window", layers=(2, 1), window_tokens=8),
        ),
        num_kv_heads=2,
        kv_dtype="bfloat16",
    )
    window = shape_of(identity, GroupId(1))
    assert window == KvShape(
        num_layers=3,
        num_kv_heads=2,
        head_size=8,
        dtype="bfloat16",
        group_kind="sliding_window",
        group_layers=(1, 2),
    )
    assert (window.layers, window.num_sides, window.head_bytes) == ((1, 2), 2, 16)
    assert holdings(Layout(block_tokens=4), window) == (
        Holding(rank=0, layers=range(2), heads=range(2), token_shard=0),
    )
    with pytest.raises(ConfigError, match=r"no such group of layers; given: 2; allowed: \[0, 1\]"):
        shape_of(identity, GroupId(2))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mla": True}, "MLA has one KV head; given: 2; allowed: 1"),
        ({"dtype": "int3"}, "unknown dtype; given: int3"),
        ({"num_layers": 0}, "num_layers must be an integer; given: 0"),
        ({"group_layers": (1, 0)}, r"in ascending order; given: \[1, 0\]; allowed: 0 to 3"),
        ({"group_layers": (4,)}, r"given: \[4\]; allowed: 0 to 3"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        shape(**changes)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local", "mamba"])
@pytest.mark.parametrize(
    ("layout", "given"),
    [
        (grid(block_tokens=4, dcp=2), "dcp=2, pcp=1"),
        (grid(block_tokens=4, pcp=2), "dcp=1, pcp=2"),
    ],
)
def test_a_grid_deals_the_tokens_of_full_attention_only(
    kind: GroupKind, layout: Layout, given: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"tokens of layers of kind {kind} are not dealt over ranks; given: {given}",
    ):
        require_full_where_dealt(layout, kinds("full", kind))
    require_full_where_dealt(layout, kinds("full", "full"))
    # Heads and layers may be cut; and what vLLM deals is told by its own rules.
    require_full_where_dealt(grid(block_tokens=4, tp=2, pp=2), kinds(kind))
    require_full_where_dealt(vllm(block_tokens=4, tp=2, dcp=2), kinds(kind))
