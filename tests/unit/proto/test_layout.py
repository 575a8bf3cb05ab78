import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.layout import Layout, RankPlace, grid, vllm
from kvferry.proto.layout_text import layout_text, parse_layout
from kvferry.proto.memory_order import AXES, Strides, strides_of


def places(layout: Layout) -> list[tuple[int, int, int]]:
    """Return (stage, head shard, token shard) of every rank."""
    found = [layout.place(rank) for rank in range(layout.num_ranks)]
    return [(place.stage, place.head_shard, place.token_shard) for place in found]


def test_one_rank_holds_whole_blocks() -> None:
    layout = Layout(block_tokens=16)
    assert (layout.num_ranks, layout.token_shards, layout.virtual_block_tokens) == (1, 1, 16)
    assert layout.place(0) == RankPlace(stage=0, head_shard=0, token_shard=0)


@pytest.mark.parametrize("block_tokens", [0, -16, True, 16.0, "16"])
def test_a_block_size_that_is_no_positive_integer_is_refused(block_tokens: object) -> None:
    with pytest.raises(ConfigError, match="block_tokens must be an integer") as caught:
        Layout(block_tokens=block_tokens)  # type: ignore[arg-type]
    assert caught.value.given == repr(block_tokens)


def test_every_axis_of_a_grid_has_ranks_of_its_own_the_last_fastest() -> None:
    layout = grid(block_tokens=4, pp=2, pcp=2, dcp=2, tp=2)
    assert (layout.num_ranks, layout.token_shards, layout.virtual_block_tokens) == (16, 4, 16)
    in_stage = [(head, shard) for shard in range(4) for head in range(2)]
    assert places(layout) == [(stage, *place) for stage in range(2) for place in in_stage]


def test_dcp_lies_inside_tp_in_vllm() -> None:
    layout = vllm(block_tokens=4, pp=2, tp=4, dcp=2)
    assert (layout.num_ranks, layout.token_shards, layout.head_shards) == (8, 2, 2)
    in_stage = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places(layout) == [(stage, *place) for stage in range(2) for place in in_stage]


def test_pcp_deals_tokens_in_vllm_017_and_makes_replicas_in_032() -> None:
    old = vllm(block_tokens=4, pcp=2, tp=2, dcp=2, profile="0.17")
    assert (old.num_ranks, old.token_shards, old.virtual_block_tokens) == (4, 4, 16)
    assert places(old) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)]
    new = vllm(block_tokens=4, pcp=2, tp=2)
    assert (new.num_ranks, new.token_shards, new.virtual_block_tokens) == (4, 1, 4)
    assert places(new) == [(0, 0, 0), (0, 1, 0), (0, 0, 0), (0, 1, 0)]


def test_in_vllm_032_dcp_takes_the_ranks_of_pcp_or_all_of_a_stage() -> None:
    of_pcp = vllm(block_tokens=4, pcp=2, tp=2, dcp=2)
    assert places(of_pcp) == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    of_all = vllm(block_tokens=4, pcp=2, tp=2, dcp=4)
    assert places(of_all) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"interleave": 3},
            "interleave must divide block_tokens; given: interleave=3; allowed: block_tokens=4",
        ),
        (
            {"kind": "vllm", "tp": 4, "dcp": 3},
            "dcp must divide tp; given: dcp=3; allowed: tp=4",
        ),
        (
            {"kind": "vllm", "tp": 4, "pcp": 2, "dcp": 4},
            "with pcp, dcp must be 1, pcp or tp * pcp; given: dcp=4; allowed: tp=4, pcp=2",
        ),
        (
            {"kind": "vllm", "profile": "0.17", "tp": 2, "pcp": 4, "dcp": 4},
            "dcp must divide tp; given: dcp=4; allowed: tp=2",
        ),
        ({"kind": "ring"}, "unknown kind; given: ring; allowed: ['grid', 'vllm']"),
        (
            {"profile": "0.17"},
            "only a layout of kind vllm has a profile; given: 0.17; allowed: kind=vllm",
        ),
        (
            {"pp": 2, "stage_layers": (3,)},
            "stage_layers must name the layers of every stage; given: stage_layers=1; allowed:"
            " pp=2",
        ),
        ({"stage_layers": (0,)}, "stage_layers must be an integer; given: 0; allowed: >= 1"),
        ({"memory": "LSBN"}, "a memory order names each axis once; given: LSBN"),
        ({"tp": 0}, "tp must be an integer; given: 0; allowed: >= 1"),
        ({"dcp": True}, "dcp must be an integer; given: True; allowed: >= 1"),
    ],
)
def test_axes_that_do_not_go_together_are_refused_with_the_rule(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        Layout(block_tokens=4, **settings)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such rank; given: 2; allowed: 0 to 1"):
        Layout(block_tokens=4, dcp=2).place(2)


@pytest.mark.parametrize(
    ("pp", "sizes"),
    [(1, [10]), (2, [5, 5]), (3, [3, 4, 3]), (4, [2, 3, 3, 2])],
)
def test_layers_left_over_go_to_the_stages_before_the_last_as_in_vllm(
    pp: int, sizes: list[int]
) -> None:
    stages = Layout(block_tokens=4, pp=pp).stages(10)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(10))


def test_stages_can_be_named() -> None:
    layout = Layout(block_tokens=4, pp=2, stage_layers=(3, 7))
    assert layout.stages(10) == (range(3), range(3, 10))
    with pytest.raises(ConfigError, match=r"share the model's layers.*allowed: num_layers=9"):
        layout.stages(9)
    with pytest.raises(ConfigError, match=r"given: pp=4, stage_layers=\[\]; allowed: num_layers=3"):
        Layout(block_tokens=4, pp=4).stages(3)


def test_heads_are_cut_evenly_or_held_by_several_shards_one_after_the_other() -> None:
    assert Layout(block_tokens=4, tp=2).heads(8) == (range(4), range(4, 8))
    two = [range(1), range(1), range(1, 2), range(1, 2)]
    assert list(Layout(block_tokens=4, tp=4).heads(2)) == two
    with pytest.raises(ConfigError, match="head_shards=3, tp=3, dcp=1; allowed: num_kv_heads=4"):
        Layout(block_tokens=4, tp=3).heads(4)


def test_the_text_of_the_command_line_is_read_in_any_order_and_subset() -> None:
    text = "pcp=2, dcp=2,interleave=4,block_tokens=16,tp=1,pp=1,kind=grid"
    assert parse_layout(text) == grid(block_tokens=16, pcp=2, dcp=2, interleave=4)
    assert parse_layout("") == Layout(block_tokens=16)
    assert parse_layout("dcp=2", block_tokens=32) == Layout(block_tokens=32, dcp=2)
    named = parse_layout("kind=vllm,profile=0.17,pp=2,stage_layers=10+14,memory=LBSHN")
    assert named == vllm(
        block_tokens=16, profile="0.17", pp=2, stage_layers=(10, 14), memory="LBSHN"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dcp", "a layout is name=value, separated by commas; given: dcp"),
        ("ring=2", "a layout is name=value, separated by commas; given: ring=2"),
        ("dcp=2,dcp=2", "a layout names a field twice; given: dcp=2"),
        ("dcp=two", "dcp must be an integer; given: two"),
        ("dcp=-1", "dcp must be an integer; given: -1"),
        ("dcp=\u0663", "dcp must be an integer; given: \u0663"),
        ("tp=" + "9" * 5000, "tp must be an integer"),
        ("dcp=0", "dcp must be an integer; given: 0"),
        ("stage_layers=3+", "stage_layers must be an integer; given: ; allowed"),
        ("kind=ring", "unknown kind; given: ring"),
        ("block_tokens=16,interleave=5", "interleave must divide block_tokens"),
    ],
)
def test_a_text_that_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        parse_layout(text)


@given(
    axes=st.tuples(*[st.integers(1, 4)] * 4),
    interleave=st.integers(1, 3),
    rounds=st.integers(1, 9),
    memory=st.permutations(AXES).map("".join),
)
def test_text_and_back_is_the_same_layout(
    axes: tuple[int, ...], interleave: int, rounds: int, memory: str
) -> None:
    tp, pp, pcp, dcp = axes
    layout = Layout(
        block_tokens=interleave * rounds,
        tp=tp,
        pp=pp,
        pcp=pcp,
        dcp=dcp,
        interleave=interleave,
        stage_layers=tuple(range(1, pp + 1)),
        memory=memory,
    )
    assert parse_layout(layout_text(layout)) == layout


SIZES = {
    "num_layers": 3,
    "num_sides": 2,
    "num_blocks": 5,
    "block_tokens": 4,
    "num_heads": 2,
    "head_bytes": 16,
}


def test_strides_are_those_of_the_memory_that_engines_lay_out() -> None:
    assert strides_of("LSBNH", **SIZES) == Strides(
        layer_step=None, side_step=640, block_step=128, token_step=32, head_step=16
    )
    assert strides_of("LBHNS", **SIZES) == Strides(
        layer_step=None, side_step=16, block_step=256, token_step=32, head_step=128
    )
    assert strides_of("BLSNH", **SIZES) == Strides(
        layer_step=256, side_step=128, block_step=768, token_step=32, head_step=16
    )


@given(order=st.permutations(AXES).map("".join))
def test_every_value_has_a_place_of_its_own_in_every_order(order: str) -> None:
    strides = strides_of(order, **SIZES)
    taken = {
        (
            strides.storage(layer),
            strides.offset(layer=layer, side=side, block=block, token=token, head=head),
        )
        for layer in range(3)
        for side in range(2)
        for block in range(5)
        for token in range(4)
        for head in range(2)
    }
    assert len(taken) == 3 * 2 * 5 * 4 * 2
    in_one_storage = 240 // (3 if order[0] == "L" else 1) * 16
    assert max(offset for _, offset in taken) == in_one_storage - 16


def test_an_unknown_memory_order_is_refused() -> None:
    with pytest.raises(BadInputError, match="a memory order names each axis once; given: LL"):
        strides_of("LL", **SIZES)
