"""Running several requests through one forward pass over a group of ranks.

Weights are on every rank. The rows (tokens) of a pass are dealt over the pcp ranks, a run to each,
for everything but attention; the dcp ranks of a pcp rank compute the same rows. In attention every
rank lets all rows see the tokens that it holds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.proto.errors import ConfigError
from kvferry.proto.slot_mapping import NOT_HERE, local_lengths, slots
from kvferry.worker.model.loading import LoadedModel
from kvferry.worker.model.runner import (
    SequenceSlice,
    flat_positions,
    flat_tokens,
    require_fitting,
    used_blocks,
)
from kvferry.worker.model.sharded_attention import LocalSpan, ShardedBatch
from kvferry.worker.model.sharded_group import RankGroup


class ShardedRunner:
    """A model, this rank's KV tensors, and the ranks that hold the other tokens.

    Args:
        loaded: a model with weights, on the CPU; the same one on every rank.
        layers: as those of `ModelRunner`, with as many blocks on every rank; a block id means, on
            each of them, its own part of one virtual block.
        ranks: the group.

    Raises:
        ConfigError: the tensors do not fit the model or are not on the CPU, or it has layers that
            do not see all tokens.
    """

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[torch.Tensor], ranks: RankGroup
    ) -> None:
        require_fitting(loaded, layers, ranks.layout.block_tokens)
        _require_full_attention(loaded)
        if layers[0].device.type != "cpu":
            raise ConfigError(
                "ranks exchange rows on the CPU", given=layers[0].device.type, allowed="cpu"
            )
        self._loaded = loaded
        self._layers = layers
        self._ranks = ranks

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Compute all slices in one pass, writing the keys and values of this rank's tokens.

        All ranks call it with the same slices. What is refused is refused by all, before anything
        is exchanged, and the group goes on.

        Returns:
            shape [num_sequences, vocab_size] at rank 0: the logits of each slice's last token. None
            at the others.

        Raises:
            BadInputError, TokenError, PromptTooLongError: as `ModelRunner.forward`.
            UnavailableError: another rank stopped; the group is over.
        """
        token_ids = flat_tokens(self._loaded, batch)
        positions = flat_positions(batch)
        sharded_batch = self._sharded_batch(batch)
        try:
            return self._compute(batch, token_ids, positions, sharded_batch)
        except BaseException:
            # The others are in the middle of the pass; another one would mix with it.
            self._ranks.close()
            raise

    def _compute(
        self,
        batch: Sequence[SequenceSlice],
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        sharded_batch: ShardedBatch,
    ) -> torch.Tensor | None:
        pcp = self._ranks.layout.pcp
        num_own = -(-len(token_ids) // pcp)
        first = self._ranks.pcp_rank * num_own
        # Whoever is left with fewer rows computes the last one again, and nobody looks at it.
        own = np.arange(first, first + num_own).clip(max=len(token_ids) - 1)
        last_rows = np.cumsum([len(piece.token_ids) for piece in batch]) - 1
        owner_of_last = last_rows // num_own
        kept = last_rows[owner_of_last == self._ranks.pcp_rank] - first
        if self._ranks.dcp_rank:
            kept = kept[:0]
        output = self._loaded.model(
            input_ids=torch.from_numpy(token_ids[own]).unsqueeze(0),
            position_ids=torch.from_numpy(positions[own]).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.from_numpy(kept),
            paged_batch=sharded_batch,
        )
        counts = np.bincount(owner_of_last, minlength=pcp).tolist()
        return self._ranks.bring_to_first(output.logits[0], counts)

    def _sharded_batch(self, batch: Sequence[SequenceSlice]) -> ShardedBatch:
        layout, shard = self._ranks.layout, self._ranks.token_shard
        dealt = {"num_shards": layout.token_shards, "interleave": layout.interleave}
        spans = []
        piece_slots = []
        first_query = 0
        for piece in batch:
            start, end = piece.start_position, piece.end_position
            used = used_blocks(
                piece,
                0,
                range(-(-end // layout.virtual_block_tokens)),
                covered_tokens=layout.virtual_block_tokens,
                num_blocks=self._layers[0].shape[1],
            )
            piece_slots.append(slots(used, start, end, layout.block_tokens, rank=shard, **dealt))
            num_visible = local_lengths(range(start + 1, end + 1), **dealt)[:, shard]
            num_local_blocks = -(-int(num_visible[-1]) // layout.block_tokens)
            spans.append(
                LocalSpan(
                    first_query=first_query,
                    num_visible=torch.from_numpy(num_visible.copy()),
                    block_ids=torch.from_numpy(used[:num_local_blocks]),
                )
            )
            first_query += len(piece.token_ids)
        row_slots = np.concatenate(piece_slots)
        kept_rows = np.flatnonzero(row_slots != NOT_HERE)
        slot_blocks, slot_offsets = np.divmod(row_slots[kept_rows], layout.block_tokens)
        return ShardedBatch(
            ranks=self._ranks,
            layers=self._layers,
            kept_rows=torch.from_numpy(kept_rows),
            slot_blocks=torch.from_numpy(slot_blocks),
            slot_offsets=torch.from_numpy(slot_offsets),
            sequences=tuple(spans),
        )


def _require_full_attention(loaded: LoadedModel) -> None:
    kinds = [group.kind for group in loaded.identity.groups]
    # All layers that see everything are one group.
    if kinds != ["full"]:
        raise ConfigError(
            "only layers that see all tokens can have them dealt over ranks",
            given=kinds,
            allowed="full attention in every layer, or one token shard (dcp * pcp = 1)",
        )
