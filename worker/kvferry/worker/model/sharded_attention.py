"""Attention over a sequence whose keys and values are dealt over several ranks.

Every rank lets all queries of a pass see its own tokens, and says with each result how much weight
it carries (the log of the sum of the exponentials of its scores). These partial results are enough
to form the result over all tokens; a rank that holds none that a query sees carries no weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.worker.model.sharded_group import RankGroup

MAX_SCORES = 1 << 24
"""Scores held at a time (in float32, so 64 MiB): queries are taken in parts that stay below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSpan:
    """What this rank lets the queries of one sequence see.

    The queries are rows `[first_query, first_query + len(num_visible))` of the pass. Of the tokens
    that the rank holds of the sequence, query `i` sees the first `num_visible[i]` (int64,
    ascending). They lie one after the other in the blocks `block_ids` (shape [num_used_blocks],
    int64), which may be none.
    """

    first_query: int
    num_visible: torch.Tensor
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBatch:
    """One forward pass over a group of ranks; each layer's tensor holds this rank's tokens.

    The rows (tokens) of the pass are dealt over the pcp ranks, to each a run of the same length;
    rows after the last token are padding. Row `kept_rows[i]` is a token that this rank holds, and
    is written to slot `slot_offsets[i]` of block `slot_blocks[i]` (all three int64).
    """

    ranks: RankGroup
    layers: Sequence[torch.Tensor]
    kept_rows: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    sequences: tuple[LocalSpan, ...]

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Write the keys and values of this rank's tokens, and attend together with the others.

        The tensors are those of `paged_attention`, of the rows that this rank computes.

        Raises:
            UnavailableError: another rank stopped.
        """
        # One message, not three.
        own = torch.cat((query, key, value), dim=1)[0].transpose(0, 1)
        every = self.ranks.join_rows(own)
        first_key, first_value = query.shape[1], query.shape[1] + key.shape[1]
        queries, keys, values = every.tensor_split((first_key, first_value), dim=1)
        layer = self.layers[layer_index]
        slots = (self.slot_blocks, self.slot_offsets)
        # All writes come first: a sequence may share blocks that another one fills in this pass.
        layer[0].index_put_(slots, keys[self.kept_rows])
        layer[1].index_put_(slots, values[self.kept_rows])
        outputs = torch.zeros(queries.shape, dtype=torch.float32)
        weights = torch.full((*queries.shape[:2], 1), -torch.inf)
        for span in self.sequences:
            rows = slice(span.first_query, span.first_query + len(span.num_visible))
            if len(span.block_ids):
                outputs[rows], weights[rows] = attend_locally(queries[rows], layer, span, scaling)
        parts = self.ranks.exchange_rows(torch.cat((outputs, weights), dim=2))
        merged = merge_partial(parts[..., :-1], parts[..., -1:])
        return merged.to(query.dtype).unsqueeze(0)


def attend_locally(
    queries: torch.Tensor, layer: torch.Tensor, span: LocalSpan, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the queries of one sequence see the tokens of it that this rank holds.

    Args:
        queries: shape [num_queries, num_heads, head_size].
        layer: shape [2, num_blocks, block_tokens, num_kv_heads, head_size].
        span: which tokens these are, at least one.
        scaling: what the scores are multiplied with.

    Returns:
        shape [num_queries, num_heads, head_size], and the logarithm of its weight, of shape
        [num_queries, num_heads, 1], -inf for a query that sees nothing here (whose output is 0);
        both float32.
    """
    num_tokens = int(span.num_visible[-1])
    both = layer.index_select(1, span.block_ids).flatten(1, 2)[:, :num_tokens].float()
    # [num_kv_heads, num_tokens, head_size] each.
    keys, values = both.transpose(1, 2)
    num_queries, num_heads, head_size = queries.shape
    num_kv_heads = layer.shape[3]
    # [num_kv_heads, query heads of a KV head, num_queries, head_size]
    heads = queries.float().transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_size)
    token = torch.arange(num_tokens)
    outputs, weights = [], []
    num_at_once = max(1, MAX_SCORES // (num_heads * num_tokens))
    for first in range(0, num_queries, num_at_once):
        part = heads[:, :, first : first + num_at_once]
        visible = span.num_visible[first : first + num_at_once, None]
        # The query heads of one KV head are rows of one product: no copy of the keys.
        scores = part.flatten(1, 2) @ keys.transpose(1, 2)
        scores.mul_(scaling)
        scores.view(*part.shape[:3], num_tokens).masked_fill_(token >= visible, -torch.inf)
        weight = scores.logsumexp(dim=2, keepdim=True)
        output = scores.sub_(_finite(weight)).exp_() @ values
        outputs.append(output.view(part.shape))
        weights.append(weight.view(*part.shape[:3], 1))
    output, weight = torch.cat(outputs, dim=2), torch.cat(weights, dim=2)
    return output.flatten(0, 1).transpose(0, 1), weight.flatten(0, 1).transpose(0, 1)


def merge_partial(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Merge what several ranks found for the same queries.

    Args:
        outputs: shape [num_ranks, ..., head_size], each over the tokens of one rank.
        weights: shape [num_ranks, ..., 1], the logarithms of their weights.

    Returns:
        shape [..., head_size]; 0 where no rank has any weight (rows that are only padding).
    """
    whole = _finite(weights.logsumexp(dim=0, keepdim=True))
    return ((weights - whole).exp() * outputs).sum(dim=0)


def _finite(weight: torch.Tensor) -> torch.Tensor:
    # -inf less -inf would be NaN: what weighs nothing must come out as 0.
    return weight.clamp(min=torch.finfo(weight.dtype).min)
