"""`WorkerService.pull` between instances of two layouts, over gRPC: whole blocks, or none of it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.arenas import arenas_work
from tests.contract.exchange import SHAPE, Exchange, exchanging

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.worker import bulk_server, chunks
from kvferry.worker.paths import Path
from kvferry.worker.pull import merge_outcomes

STAGE = (SHAPE.num_layers,)
CHUNK_TOKENS = 10
"""Of all four heads; of fewer heads a chunk has more tokens."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few tokens, so that a transfer has several."""
    token_bytes = 2 * SHAPE.num_kv_heads * SHAPE.head_bytes
    monkeypatch.setattr(chunks, "CHUNK_PAGE_BYTES", CHUNK_TOKENS * token_bytes)


def pull_everything(exchange: Exchange) -> None:
    """All ranks pull all asked blocks, and have them, at the price of the plan."""
    outcomes = exchange.pull_all()
    merged = merge_outcomes(outcomes)
    assert (merged.error, merged.num_checksum_failures) == (None, 0)
    assert merged.num_blocks_of_run == (exchange.num_blocks,)
    assert merged.num_bytes == exchange.plan.num_bytes
    # What is copied by its receiver is served by nobody.
    served = 0 if "shm" in exchange.paths and arenas_work() else merged.num_bytes
    assert sum(one.stats().of("served").num_bytes for one in exchange.senders) == served
    for rank in range(exchange.destination.num_ranks):
        exchange.assert_holds(rank, exchange.num_blocks)


@pytest.mark.parametrize("first_block", [0, 1, 3])
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        # A destination block has parts of two source blocks, and the reverse.
        (grid(block_tokens=4, stage_layers=STAGE), grid(block_tokens=6, stage_layers=STAGE)),
        (grid(block_tokens=12, stage_layers=STAGE), grid(block_tokens=8, stage_layers=STAGE)),
        (grid(block_tokens=16, stage_layers=STAGE), grid(block_tokens=4, stage_layers=STAGE)),
        # Tokens dealt in another way, by ranks of another number.
        (grid(block_tokens=8, pcp=2, stage_layers=STAGE),
         grid(block_tokens=8, dcp=2, interleave=4, stage_layers=STAGE)),
        (grid(block_tokens=4, dcp=3, interleave=2, stage_layers=STAGE),
         grid(block_tokens=6, pcp=2, dcp=2, interleave=3, stage_layers=STAGE)),
        # Heads: cut finer and coarser, and replicated on either side.
        (grid(block_tokens=4, tp=2, stage_layers=STAGE),
         grid(block_tokens=4, tp=4, stage_layers=STAGE)),
        (grid(block_tokens=6, tp=8, stage_layers=STAGE),
         grid(block_tokens=4, tp=2, stage_layers=STAGE)),
        (grid(block_tokens=4, tp=2, stage_layers=STAGE),
         grid(block_tokens=6, tp=8, stage_layers=STAGE)),
        # Layers.
        (grid(block_tokens=4, pp=2, stage_layers=(1, 3)),
         grid(block_tokens=4, pp=3, stage_layers=(2, 1, 1))),
        # vLLM's own places, and everything at once.
        (vllm(block_tokens=4, tp=4, dcp=2, stage_layers=STAGE),
         grid(block_tokens=6, tp=2, pp=2, dcp=3, interleave=2, stage_layers=(1, 3))),
        (vllm(block_tokens=4, tp=4, dcp=2, profile="0.17", pcp=2, stage_layers=STAGE),
         vllm(block_tokens=8, tp=2, pp=2, pcp=2, dcp=2, stage_layers=(2, 2))),
    ],
)  # fmt: skip
def test_every_rank_gets_its_part_of_blocks_from_an_instance_of_another_layout(
    source: Layout, destination: Layout, first_block: int
) -> None:
    with exchanging(source, destination, first_block=first_block, num_blocks=3) as exchange:
        pull_everything(exchange)


@pytest.mark.parametrize(
    "layout",
    [
        grid(block_tokens=4, stage_layers=STAGE),
        grid(block_tokens=4, tp=2, dcp=2, interleave=2, stage_layers=STAGE),
        vllm(block_tokens=4, tp=8, pp=2, dcp=2, stage_layers=(1, 3)),
    ],
)
def test_with_one_layout_every_rank_takes_whole_blocks_from_the_one_of_its_number(
    layout: Layout,
) -> None:
    with exchanging(layout, layout, first_block=2, num_blocks=5) as exchange:
        pull_everything(exchange)
        fetches = [one.stats().of("served").num_started for one in exchange.senders]
        assert fetches == [1] * layout.num_ranks


def test_a_source_of_another_memory_order_sends_whole_blocks_too() -> None:
    ours = grid(block_tokens=4, tp=2, stage_layers=STAGE)
    with exchanging(ours, ours, num_blocks=3) as exchange:
        exchange.source = replace(ours, memory="LBSHN")
        pull_everything(exchange)
    with exchanging(ours, ours, num_blocks=3) as exchange:
        exchange.source = replace(ours, memory="LBSHN")
        # By chunks of 20 tokens nothing would be left of it.
        exchange.lose(1, 2)
        assert exchange.pull(1).num_blocks_of_run == (2,)
        exchange.assert_holds(1, 2)


@pytest.mark.parametrize("num_ranks", [(4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("first_block", [0, 1])
def test_b27_ranks_of_other_numbers_get_each_others_blocks_whole_and_byte_for_byte(
    num_ranks: tuple[int, int], first_block: int
) -> None:
    """The case says that a service with DCP 2 never hits entries of DCP 4.

    What it protects from are wrong bytes: per rank, blocks of both have one size. Here both may
    share a chain of hashes, because a layout goes along with every source, and a plan with every
    pull. What arrives is whole in blocks of the taker, and byte for byte where the taker keeps it.
    """
    source, destination = (grid(block_tokens=4, dcp=dcp, stage_layers=STAGE) for dcp in num_ranks)
    with exchanging(source, destination, first_block=first_block, num_blocks=2) as exchange:
        pull_everything(exchange)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of at most 8 ranks and blocks of at most 24 tokens, for the shape."""
    interleave = draw(st.integers(1, 3))
    first = draw(st.integers(1, 3))
    pp = draw(st.integers(1, 2))
    values: dict[str, Any] = {
        "kind": draw(st.sampled_from(["grid", "vllm"])),
        "block_tokens": interleave * draw(st.integers(1, 4)),
        "interleave": interleave,
        "tp": draw(st.sampled_from([1, 2, 4, 8])),
        "pp": pp,
        "pcp": draw(st.integers(1, 2)),
        "dcp": draw(st.integers(1, 3)),
        "stage_layers": (first, 4 - first) if pp == 2 else STAGE,
    }
    if values["kind"] == "vllm":
        values["profile"] = draw(st.sampled_from(["0.17", "0.32"]))
    try:
        layout = Layout(**values)
        layout.heads(SHAPE.num_kv_heads)
    except ConfigError:
        assume(False)
    assume(layout.num_ranks <= 8 and layout.virtual_block_tokens <= 24)
    return layout


@pytest.fixture(scope="module")
def sockets_for_little() -> Iterator[None]:
    """A bulk socket is worth its while however few bytes there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
        yield


@pytest.mark.usefixtures("sockets_for_little")
# Most sizes drawn at random do not fit together.
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    layouts(),
    layouts(),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from([(), ("bulk",), ("shm",)]),
)
def test_any_instance_pulls_from_any_other_by_any_path(
    source: Layout,
    destination: Layout,
    first_block: int,
    num_blocks: int,
    paths: tuple[Path, ...],
) -> None:
    with exchanging(
        source, destination, first_block=first_block, num_blocks=num_blocks, paths=paths
    ) as exchange:
        pull_everything(exchange)
