"""Instances whose pool or groups cannot work are refused, and nothing has changed then."""

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import make_identity
from tests.unit.coordinator.fleet import BLOCK_TOKENS, HYBRID, IDENTITY, Fleet

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import GroupSpec
from kvferry.proto.layout import Layout

TWO_RANKS: dict[str, Any] = {
    "rank_addresses": ("127.0.0.1:1", "127.0.0.1:2"),
    "rank_pids": (1, 2),
    "rank_metrics": ("127.0.0.1:3", "127.0.0.1:4"),
    "rank_nodes": ("n1", "n2"),
}


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.register("a")
    return fleet


def test_a_life_whose_pool_cannot_be_made_leaves_the_one_before_it(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    with pytest.raises(ConfigError, match="unknown dtype"):
        fleet.register("a", incarnation=2, identity=replace(IDENTITY, kv_dtype="fp7"))
    assert fleet.locate("xy")["a"] == 2


def test_chunks_that_are_no_whole_blocks_are_refused(fleet: Fleet) -> None:
    groups = (GroupSpec(kind="chunked_local", layers=(0,), chunk_tokens=6),)
    with pytest.raises(ConfigError, match="must be whole blocks; given: chunk_tokens=6"):
        fleet.register("c", identity=replace(IDENTITY, groups=groups))


def test_a_virtual_block_may_be_any_multiple_of_a_hash_block_and_nothing_else(
    fleet: Fleet,
) -> None:
    fleet.register("b", layout=Layout(block_tokens=3 * BLOCK_TOKENS))
    # Two ranks of half a hash block each make a whole one.
    fleet.register("c", layout=Layout(block_tokens=BLOCK_TOKENS // 2, dcp=2), **TWO_RANKS)
    with pytest.raises(
        ConfigError,
        match="instance d: a virtual block must be a multiple of a hash block; "
        "given: virtual_block_tokens=2; allowed: multiples of hash_block_tokens=4",
    ):
        fleet.register("d", layout=Layout(block_tokens=2))
    assert list(fleet.service.state.instances) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("layout", "changes", "given"),
    [
        (Layout(block_tokens=8), {}, "virtual_block_tokens=8, num_ranks=1"),
        (Layout(block_tokens=2, dcp=2), TWO_RANKS, "virtual_block_tokens=4, num_ranks=2"),
    ],
)
def test_a_store_keeps_single_hash_blocks_on_one_rank(
    fleet: Fleet, layout: Layout, changes: dict[str, Any], given: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"instance s: a store has one rank.*given: {given}; "
        "allowed: virtual_block_tokens=4, num_ranks=1",
    ):
        fleet.register("s", role="store", layout=layout, **changes)
    fleet.register("s", role="store")


@pytest.mark.parametrize("name", ["rank_addresses", "rank_pids", "rank_metrics", "rank_nodes"])
def test_every_rank_of_a_layout_must_be_told(fleet: Fleet, name: str) -> None:
    layout = Layout(block_tokens=BLOCK_TOKENS, tp=2)
    identity = make_identity(num_kv_heads=2)
    for wrong in (TWO_RANKS[name][:1], TWO_RANKS[name] + TWO_RANKS[name][:1]):
        with pytest.raises(
            ConfigError,
            match=f"instance t: {name} must tell of every rank of the layout; "
            f"given: {name}={len(wrong)}; allowed: num_ranks=2",
        ):
            fleet.register("t", layout=layout, identity=identity, **{**TWO_RANKS, name: wrong})
    fleet.register("t", layout=layout, identity=identity, **TWO_RANKS)


def test_only_full_attention_is_dealt_over_ranks(fleet: Fleet) -> None:
    layout = Layout(block_tokens=2, pcp=2)
    with pytest.raises(
        ConfigError,
        match="instance g: tokens of layers of kind sliding_window are not dealt over ranks; "
        "given: dcp=1, pcp=2",
    ):
        fleet.register("g", identity=HYBRID, layout=layout, **TWO_RANKS)
    fleet.register("g", layout=layout, **TWO_RANKS)
