"""Partial attention over dealt tokens merges to the whole, and what cannot be dealt is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvferry.proto.errors import ConfigError, TokenError, UnavailableError
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.proto.slot_mapping import NOT_HERE, local_lengths, slots
from kvferry.worker.model import sharded_attention
from kvferry.worker.model.loading import load_model
from kvferry.worker.model.runner import SequenceSlice
from kvferry.worker.model.sharded_attention import LocalSpan, attend_locally, merge_partial
from kvferry.worker.model.sharded_group import MeetingPoint, RankGroup
from kvferry.worker.model.sharded_runner import ShardedRunner

BLOCK_TOKENS = 4
NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 2, 6, 8
SCALING = 0.7


@pytest.mark.parametrize("max_scores", [1, 100, 1 << 24])
@settings(deadline=None, max_examples=60)
@given(
    context=st.integers(1, 40),
    data=st.data(),
    num_shards=st.integers(1, 5),
    interleave=st.sampled_from([1, 2, 4]),
)
def test_the_parts_of_all_shards_merge_to_causal_attention_over_all_tokens(
    max_scores: int, context: int, data: st.DataObject, num_shards: int, interleave: int
) -> None:
    start = data.draw(st.integers(0, context - 1))
    random = torch.Generator().manual_seed(context * 100 + start)
    keys = torch.randn(context, NUM_KV_HEADS, HEAD_SIZE, generator=random)
    values = torch.randn(context, NUM_KV_HEADS, HEAD_SIZE, generator=random)
    queries = torch.randn(context - start, NUM_HEADS, HEAD_SIZE, generator=random)
    virtual_blocks = -(-context // (BLOCK_TOKENS * num_shards))
    table = list(range(virtual_blocks))[::-1]
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_attention, "MAX_SCORES", max_scores)
        for shard in range(num_shards):
            dealt: dict[str, Any] = {"num_shards": num_shards, "interleave": interleave}
            own = slots(table, 0, context, BLOCK_TOKENS, rank=shard, **dealt)
            here = own != NOT_HERE
            # NaN: whatever reads a slot before it is written shows.
            shape = (2, virtual_blocks * BLOCK_TOKENS, NUM_KV_HEADS, HEAD_SIZE)
            layer = torch.full(shape, float("nan"))
            layer[0, own[here]], layer[1, own[here]] = keys[here], values[here]
            visible = local_lengths(range(start + 1, context + 1), **dealt)[:, shard]
            used = -(-int(visible[-1]) // BLOCK_TOKENS)
            if not used:
                parts.append(
                    (torch.zeros(queries.shape), torch.full((*queries.shape[:2], 1), -torch.inf))
                )
                continue
            span = LocalSpan(
                first_query=0,
                num_visible=torch.tensor(visible),
                block_ids=torch.tensor(table[:used]),
            )
            blocks = layer.view(2, virtual_blocks, BLOCK_TOKENS, NUM_KV_HEADS, HEAD_SIZE)
            parts.append(attend_locally(queries, blocks, span, SCALING))
    outputs, weights = zip(*parts, strict=True)
    merged = merge_partial(torch.stack(outputs), torch.stack(weights))
    whole = scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=torch.ones(context - start, context, dtype=torch.bool).tril(start),
        scale=SCALING,
        enable_gqa=True,
    )
    torch.testing.assert_close(merged, whole.transpose(0, 1), atol=1e-5, rtol=0)


def test_rows_that_nobody_has_anything_for_merge_to_zero() -> None:
    merged = merge_partial(torch.zeros(3, 1, 2), torch.full((3, 1, 1), -torch.inf))
    assert merged.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "layout",
    [
        grid(block_tokens=16),
        grid(block_tokens=16, tp=2, dcp=2),
        grid(block_tokens=16, pp=2, dcp=2),
        vllm(block_tokens=16, tp=2, dcp=2),
    ],
)
def test_layouts_that_no_group_computes_are_refused(layout: Layout) -> None:
    with pytest.raises(ConfigError, match=r"tp=.*allowed: kind=grid, tp=1, pp=1, pcp \* dcp=>= 2"):
        make_group(layout, 0)


def test_a_rank_that_the_layout_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such rank; given: 2; allowed: 0 to 1"):
        make_group(grid(block_tokens=16, dcp=2), 2)


def test_a_meeting_point_that_is_not_there_is_an_error_that_names_the_group() -> None:
    with pytest.raises(UnavailableError, match="given: group=decode-0, rank=1, ranks=2, reason="):
        make_group(grid(block_tokens=16, dcp=2), 1)


def test_ranks_meet_and_listen_at_hosts_of_this_machine_only() -> None:
    with pytest.raises(ConfigError, match=r"given: 192\.0\.2\.1"):
        MeetingPoint("192.0.2.1")
    with pytest.raises(ConfigError, match=r"listen on this host; given: 192\.0\.2\.1"):
        make_group(grid(block_tokens=16, dcp=2), 1, host="192.0.2.1")


def make_group(layout: Layout, rank: int, host: str = "127.0.0.1") -> RankGroup:
    nobody = "127.0.0.1:1"
    return RankGroup(
        "decode-0", layout, rank=rank, meeting_address=nobody, host=host, timeout_s=0.3
    )


class LoneRank:
    """A group whose other ranks are not there."""

    layout = grid(block_tokens=16, dcp=2)
    rank = token_shard = pcp_rank = dcp_rank = 0
    closed = False

    def join_rows(self, rows: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room for the rows")

    def close(self) -> None:
        self.closed = True


def runner_of(folder: Path, ranks: Any, device: str = "cpu") -> ShardedRunner:
    loaded = load_model(str(folder))
    loaded.model.to(device)  # type: ignore[arg-type]
    shape = (2, 8, 16, loaded.num_kv_heads, loaded.head_size)
    layers = [torch.zeros(shape, device=device) for _ in range(loaded.num_layers)]
    return ShardedRunner(loaded, layers, ranks)


def test_a_rank_that_fails_in_a_pass_leaves_the_group_so_that_no_other_pass_mixes_with_it(
    tiny_models: dict[str, Path],
) -> None:
    ranks = LoneRank()
    runner = runner_of(tiny_models["llama"], ranks)
    piece = SequenceSlice(token_ids=[1, 2], start_position=0, block_tables=[[3]])
    with pytest.raises(MemoryError, match="no room"):
        runner.forward([piece])
    assert ranks.closed


def test_a_batch_that_is_refused_does_not_end_the_group(tiny_models: dict[str, Path]) -> None:
    ranks = LoneRank()
    runner = runner_of(tiny_models["llama"], ranks)
    piece = SequenceSlice(token_ids=[1, 61], start_position=0, block_tables=[[3]])
    with pytest.raises(TokenError, match="given: 61; allowed: 0 to 60"):
        runner.forward([piece])
    assert not ranks.closed


def test_tensors_that_the_ranks_cannot_exchange_are_refused(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="exchange rows on the CPU; given: meta; allowed: cpu"):
        runner_of(tiny_models["llama"], LoneRank(), "meta")


def test_layers_with_a_window_are_refused_with_the_rule(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"see all tokens.*sliding_window.*one token shard"):
        runner_of(tiny_models["gemma3_text"], LoneRank())
