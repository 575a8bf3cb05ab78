"""Running several requests through one forward pass over paged KV tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.proto.errors import BadInputError, ConfigError, PromptTooLongError, TokenError
from kvferry.proto.slot_mapping import slots
from kvferry.worker.model.attention import (
    GroupBatch,
    PagedBatch,
    SequenceSpan,
    causal_mask,
    visible_from,
)
from kvferry.worker.model.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Tokens `[start_position, start_position + len(token_ids))` of a sequence, to be computed.

    `block_tables` has one table per group of the model's identity; block `i` of a table holds
    positions `[i * V, (i + 1) * V)` of the group's layers, V being the tokens of a block over all
    ranks that tokens are dealt over. What the slice sees before `start_position` has been written
    there already. A block that lies wholly before the window of `start_position` is not looked at:
    the table may name any block there.
    """

    token_ids: Sequence[int]
    start_position: int
    block_tables: Sequence[Sequence[int]]

    @property
    def end_position(self) -> int:
        """Number of tokens of the sequence that are in the cache after the forward pass."""
        return self.start_position + len(self.token_ids)


class ModelRunner:
    """A model and the KV tensors it reads and writes.

    Args:
        loaded: a model with weights, on the device of the tensors.
        layers: one tensor per layer, of shape
            [2, num_blocks, block_tokens, num_kv_heads, head_size] and the model's dtype; any
            strides. Layers of different groups may be views of the same memory.
        block_tokens: slots per block.

    Raises:
        ConfigError: the tensors do not fit the model.
    """

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[torch.Tensor], block_tokens: int
    ) -> None:
        require_fitting(loaded, layers, block_tokens)
        self._loaded = loaded
        self._layers = layers
        self._block_tokens = block_tokens
        self._num_blocks = layers[0].shape[1]
        self._device = layers[0].device
        groups = loaded.identity.groups
        # A group's window; None where it sees all.
        self._windows = [group.window_tokens for group in groups]
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._group_ids = [group_of[layer] for layer in range(loaded.num_layers)]

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute all slices in one pass, writing their keys and values.

        Returns:
            shape [num_sequences, vocab_size]: the logits of each slice's last token.

        Raises:
            BadInputError: no slice, an empty one, not one block table per group, or a block table
                that is too short or names a block that is not there.
            TokenError: a token id outside the vocabulary.
            PromptTooLongError: positions beyond the model's limit.
        """
        token_ids = self._tensor(flat_tokens(self._loaded, batch))
        positions = self._tensor(flat_positions(batch))
        last_tokens = np.cumsum([len(piece.token_ids) for piece in batch]) - 1
        output = self._loaded.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=self._tensor(last_tokens),
            paged_batch=self._paged_batch(batch),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _paged_batch(self, batch: Sequence[SequenceSlice]) -> PagedBatch:
        # Groups of one window see the same tokens, in different blocks.
        masks = {window: self._masks(batch, window) for window in set(self._windows)}
        groups = [
            self._group_batch(batch, group_id, masks[window])
            for group_id, window in enumerate(self._windows)
        ]
        return PagedBatch(
            layers=self._layers,
            group_of_layer=[groups[group_id] for group_id in self._group_ids],
        )

    def _masks(
        self, batch: Sequence[SequenceSlice], window: int | None
    ) -> list[torch.Tensor | None]:
        return [
            causal_mask(
                len(piece.token_ids),
                piece.end_position - visible_from(piece.start_position, window),
                window,
                self._device,
            )
            for piece in batch
        ]

    def _group_batch(
        self,
        batch: Sequence[SequenceSlice],
        group_id: int,
        masks: Sequence[torch.Tensor | None],
    ) -> GroupBatch:
        block_tokens = self._block_tokens
        spans = []
        piece_slots = []
        first_query = 0
        for piece, mask in zip(batch, masks, strict=True):
            num_queries = len(piece.token_ids)
            first_visible = visible_from(piece.start_position, self._windows[group_id])
            skipped_blocks, first_slot = divmod(first_visible, block_tokens)
            skipped_tokens = skipped_blocks * block_tokens
            used = used_blocks(
                piece,
                group_id,
                range(skipped_blocks, -(-piece.end_position // block_tokens)),
                covered_tokens=block_tokens,
                num_blocks=self._num_blocks,
            )
            start, end = piece.start_position - skipped_tokens, piece.end_position - skipped_tokens
            piece_slots.append(slots(used, start, end, block_tokens))
            spans.append(
                SequenceSpan(
                    first_query=first_query,
                    num_queries=num_queries,
                    context_tokens=piece.end_position - first_visible,
                    first_slot=first_slot,
                    block_ids=torch.from_numpy(used).to(self._device),
                    mask=mask,
                )
            )
            first_query += num_queries
        slot_blocks, slot_offsets = np.divmod(np.concatenate(piece_slots), block_tokens)
        return GroupBatch(
            slot_blocks=torch.from_numpy(slot_blocks).to(self._device),
            slot_offsets=torch.from_numpy(slot_offsets).to(self._device),
            sequences=tuple(spans),
        )

    def _tensor(self, values: npt.ArrayLike) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)


def flat_tokens(loaded: LoadedModel, batch: Sequence[SequenceSlice]) -> npt.NDArray[np.int64]:
    """Return the tokens of all slices, end to end, if the model can compute them.

    Raises:
        BadInputError: no slice, an empty one, or not one block table per group.
        TokenError: a token id outside the vocabulary.
        PromptTooLongError: positions beyond the model's limit.
    """
    if not batch:
        raise BadInputError("a forward pass needs at least one slice", given=0, allowed=">= 1")
    for piece in batch:
        _require_runnable(loaded, piece)
    token_ids = np.array([token for piece in batch for token in piece.token_ids], dtype=np.int64)
    smallest, largest = int(token_ids.min()), int(token_ids.max())
    if smallest < 0 or largest >= loaded.vocab_size:
        raise TokenError(
            "token id outside the model's vocabulary",
            given=smallest if smallest < 0 else largest,
            allowed=f"0 to {loaded.vocab_size - 1}",
        )
    return token_ids


def flat_positions(batch: Sequence[SequenceSlice]) -> npt.NDArray[np.int64]:
    """Return the positions of all slices, end to end."""
    return np.concatenate(
        [np.arange(p.start_position, p.end_position, dtype=np.int64) for p in batch]
    )


def used_blocks(
    piece: SequenceSlice, group_id: int, used: range, *, covered_tokens: int, num_blocks: int
) -> npt.NDArray[np.int64]:
    """Return the block ids that a slice reads or writes in a group, in their order.

    Args:
        piece: the slice.
        group_id: the group.
        used: which places of the group's block table; up to the end of the slice.
        covered_tokens: positions of a sequence that a block id covers.
        num_blocks: number of block ids there are.

    Raises:
        BadInputError: the table is too short, or names a block that is not there.
    """
    table = piece.block_tables[group_id]
    if len(table) < used.stop:
        raise BadInputError(
            f"the block table of group {group_id} is too short for the slice",
            given=f"{piece.end_position} tokens",
            allowed=f"up to {len(table) * covered_tokens} in {len(table)} blocks",
        )
    block_ids = np.array(table[used.start : used.stop], dtype=np.int64)
    if block_ids.min() < 0 or block_ids.max() >= num_blocks:
        raise BadInputError(
            f"the block table of group {group_id} names a block that is not there",
            given=block_ids.tolist(),
            allowed=f"0 to {num_blocks - 1}",
        )
    return block_ids


def _require_runnable(loaded: LoadedModel, piece: SequenceSlice) -> None:
    if not piece.token_ids or piece.start_position < 0:
        raise BadInputError(
            "a slice needs tokens and a position to put them at",
            given={"tokens": len(piece.token_ids), "start_position": piece.start_position},
            allowed={"tokens": ">= 1", "start_position": ">= 0"},
        )
    if piece.end_position > loaded.max_model_len:
        raise PromptTooLongError(
            "more tokens than the model has positions for",
            given=piece.end_position,
            allowed=f"up to {loaded.max_model_len}",
        )
    num_groups = len(loaded.identity.groups)
    if len(piece.block_tables) != num_groups:
        raise BadInputError(
            "one block table per group is needed",
            given=len(piece.block_tables),
            allowed=num_groups,
        )


def require_fitting(loaded: LoadedModel, layers: Sequence[torch.Tensor], block_tokens: int) -> None:
    """Refuse KV tensors that do not fit the model.

    Raises:
        ConfigError: not one per layer, or another shape, dtype or device.
    """
    if len(layers) != loaded.num_layers:
        raise ConfigError(
            "one KV tensor per layer is needed", given=len(layers), allowed=loaded.num_layers
        )
    num_blocks = layers[0].shape[1] if layers[0].dim() > 1 else 1
    shape = (2, num_blocks, block_tokens, loaded.num_kv_heads, loaded.head_size)
    wanted = (shape, loaded.model.dtype, loaded.model.device)
    for index, layer in enumerate(layers):
        found = (tuple(layer.shape), layer.dtype, layer.device)
        if found != wanted:
            raise ConfigError(
                f"the KV tensor of layer {index} does not fit the model",
                given=[str(item) for item in found],
                allowed=[str(item) for item in wanted],
            )
