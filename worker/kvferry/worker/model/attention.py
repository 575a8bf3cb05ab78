"""Paged attention, called by transformers in place of its own attention functions.

Keys and values live in blocks of `block_tokens` slots, in one tensor per layer of shape
[2, num_blocks, block_tokens, num_kv_heads, head_size] (0 keys, 1 values). Sequences of one forward
pass are laid end to end and never see each other. The layers of a group share block tables and a
window: of `window` tokens, a token sees itself and the `window - 1` before it; None is all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PAGED_ATTENTION = "kvferry_paged"
"""Name under which transformers finds `paged_attention`.

No mask function is registered under it, so transformers builds no mask at all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """What the layers of one group read of one sequence of the forward pass.

    The queries are tokens `[first_query, first_query + num_queries)` of the pass and the last
    `num_queries` of the sequence's last `context_tokens` tokens, the only ones that any of them
    sees. `block_ids` (shape [num_used_blocks], int64) is where these lie, the first one in slot
    `first_slot` of the first block. `mask` (shape [num_queries, context_tokens], True: may be seen)
    is None when no query needs one: a single query sees all of its context, and where queries and
    context are the same tokens, within one window, they are plainly causal.
    """

    first_query: int
    num_queries: int
    context_tokens: int
    first_slot: int
    block_ids: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """What one forward pass writes where in the layers of one group, and what each sequence reads.

    Token `i` of the pass is written to slot `slot_offsets[i]` of block `slot_blocks[i]` (both of
    shape [total_tokens], int64).
    """

    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    sequences: tuple[SequenceSpan, ...]


class AttentionBatch(Protocol):
    """Where the layers of one forward pass write keys and values, and what its tokens see."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Write the new keys and values of a layer, then let every sequence attend to its own.

        Arguments and result are those of `paged_attention`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """A pass over sequences that lie whole on one rank: each layer's KV tensor, and its group."""

    layers: Sequence[torch.Tensor]
    group_of_layer: Sequence[GroupBatch]

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Write the new keys and values of a layer, then attend sequence by sequence."""
        layer = self.layers[layer_index]
        group = self.group_of_layer[layer_index]
        slots = (group.slot_blocks, group.slot_offsets)
        # All writes come first: a sequence may share blocks that another one fills in this pass.
        layer[0].index_put_(slots, key[0].transpose(0, 1))
        layer[1].index_put_(slots, value[0].transpose(0, 1))
        output = torch.empty_like(query)
        for span in group.sequences:
            part = slice(span.first_query, span.first_query + span.num_queries)
            if span.num_queries == span.context_tokens:
                seen = (key[:, :, part], value[:, :, part])
            else:
                seen = _read(layer, span)
            output[:, :, part] = _attend(query[:, :, part], *seen, span.mask, scaling)
        return output.transpose(1, 2)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    paged_batch: AttentionBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, then let every sequence attend to its own tokens, causally.

    Args:
        module: the attention module; its `layer_idx` is the layer.
        query: shape [1, num_heads, total_tokens, head_size].
        key: shape [1, num_kv_heads, total_tokens, head_size], rotated.
        value: as `key`.
        attention_mask: always None.
        scaling: what the scores are multiplied with.
        paged_batch: handed through by the model's forward as a keyword argument.

    Returns:
        shape [1, total_tokens, num_heads, head_size], and no attention weights.
    """
    layer_index = int(module.layer_idx)  # type: ignore[arg-type]
    return paged_batch.attend(layer_index, query, key, value, scaling), None


def visible_from(start_position: int, window: int | None) -> int:
    """Return the first position that a query at `start_position`, or any after it, sees."""
    return 0 if window is None else max(0, start_position - window + 1)


def causal_mask(
    num_queries: int, context_tokens: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return the mask of `SequenceSpan`.

    The last query is the last token of the context; each sees itself and what lies before it, as
    far as its window goes.
    """
    first_query = context_tokens - num_queries
    fits_window = window is None or num_queries <= window
    if num_queries == 1 or (first_query == 0 and fits_window):
        return None
    mask = torch.ones(num_queries, context_tokens, dtype=torch.bool, device=device)
    mask = mask.tril(diagonal=first_query)
    return mask if window is None else mask.triu(diagonal=first_query - window + 1)


def _read(layer: torch.Tensor, span: SequenceSpan) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values, each of shape [1, num_kv_heads, context_tokens, head_size]."""
    used = slice(span.first_slot, span.first_slot + span.context_tokens)
    both = layer.index_select(1, span.block_ids).flatten(1, 2)[:, used]
    keys, values = both.transpose(1, 2).unsqueeze(1)
    return keys, values


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    num_heads, num_kv_heads, num_queries = query.shape[1], keys.shape[1], query.shape[2]
    if num_queries == 1:
        # The query heads of one KV head become the queries of one head: no copy of the keys, and
        # faster than `enable_gqa`.
        packed = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, query.shape[3])
        attended = scaled_dot_product_attention(packed, keys, values, scale=scaling)
        return attended.reshape(query.shape)
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
