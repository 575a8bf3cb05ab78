"""Running several requests through one forward pass over paged KV tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.proto.errors import BadInputError, ConfigError, PromptTooLongError, TokenError
from kvferry.worker.model.attention import PagedBatch, SequenceSpan, causal_mask
from kvferry.worker.model.loading import LoadedModel
from kvferry.worker.slot_mapping import slots


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Tokens `[start_position, start_position + len(token_ids))` of a sequence, to be computed.

    Everything before `start_position` has been written into the blocks of `block_table` already;
    block `i` of the table holds positions `[i * block_tokens, (i + 1) * block_tokens)`.
    """

    token_ids: Sequence[int]
    start_position: int
    block_table: Sequence[int]

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
            strides.
        block_tokens: slots per block.

    Raises:
        ConfigError: the tensors do not fit the model.
    """

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[torch.Tensor], block_tokens: int
    ) -> None:
        _require_fitting(loaded, layers, block_tokens)
        self._loaded = loaded
        self._layers = layers
        self._block_tokens = block_tokens
        self._num_blocks = layers[0].shape[1]
        self._device = layers[0].device

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute all slices in one pass, writing their keys and values.

        Returns:
            shape [num_sequences, vocab_size]: the logits of each slice's last token.

        Raises:
            BadInputError: no slice, an empty one, or a block table that is too short or names a
                block that is not there.
            TokenError: a token id outside the vocabulary.
            PromptTooLongError: positions beyond the model's limit.
        """
        if not batch:
            raise BadInputError("a forward pass needs at least one slice", given=0, allowed=">= 1")
        for piece in batch:
            self._require_runnable(piece)
        token_ids = self._tensor([token for piece in batch for token in piece.token_ids])
        self._require_tokens(token_ids)
        positions = torch.cat(
            [torch.arange(p.start_position, p.end_position, device=self._device) for p in batch]
        )
        paged_batch = self._paged_batch(batch)
        last_tokens = [s.first_query + s.num_queries - 1 for s in paged_batch.sequences]
        output = self._loaded.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=self._tensor(last_tokens),
            paged_batch=paged_batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _paged_batch(self, batch: Sequence[SequenceSlice]) -> PagedBatch:
        spans: list[SequenceSpan] = []
        piece_slots: list[npt.NDArray[np.int64]] = []
        block_tokens = self._block_tokens
        first_query = 0
        for piece in batch:
            num_used_blocks = -(-piece.end_position // block_tokens)
            table = np.array(piece.block_table[:num_used_blocks], dtype=np.int64)
            num_queries = len(piece.token_ids)
            piece_slots.append(slots(table, piece.start_position, piece.end_position, block_tokens))
            spans.append(
                SequenceSpan(
                    first_query=first_query,
                    num_queries=num_queries,
                    context_tokens=piece.end_position,
                    block_ids=torch.from_numpy(table).to(self._device),
                    mask=causal_mask(num_queries, piece.end_position, self._device),
                )
            )
            first_query += num_queries
        slot_blocks, slot_offsets = np.divmod(np.concatenate(piece_slots), block_tokens)
        return PagedBatch(
            layers=self._layers,
            slot_blocks=torch.from_numpy(slot_blocks).to(self._device),
            slot_offsets=torch.from_numpy(slot_offsets).to(self._device),
            sequences=tuple(spans),
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _require_tokens(self, token_ids: torch.Tensor) -> None:
        smallest, largest = int(token_ids.min()), int(token_ids.max())
        if smallest < 0 or largest >= self._loaded.vocab_size:
            raise TokenError(
                "token id outside the model's vocabulary",
                given=smallest if smallest < 0 else largest,
                allowed=f"0 to {self._loaded.vocab_size - 1}",
            )

    def _require_runnable(self, piece: SequenceSlice) -> None:
        if not piece.token_ids or piece.start_position < 0:
            raise BadInputError(
                "a slice needs tokens and a position to put them at",
                given={"tokens": len(piece.token_ids), "start_position": piece.start_position},
                allowed={"tokens": ">= 1", "start_position": ">= 0"},
            )
        if piece.end_position > self._loaded.max_model_len:
            raise PromptTooLongError(
                "more tokens than the model has positions for",
                given=piece.end_position,
                allowed=f"up to {self._loaded.max_model_len}",
            )
        room_tokens = len(piece.block_table) * self._block_tokens
        if piece.end_position > room_tokens:
            raise BadInputError(
                "the block table is too short for the slice",
                given=f"{piece.end_position} tokens",
                allowed=f"up to {room_tokens} in {len(piece.block_table)} blocks",
            )
        if min(piece.block_table) < 0 or max(piece.block_table) >= self._num_blocks:
            raise BadInputError(
                "the block table names a block that is not there",
                given=list(piece.block_table),
                allowed=f"0 to {self._num_blocks - 1}",
            )


def _require_fitting(
    loaded: LoadedModel, layers: Sequence[torch.Tensor], block_tokens: int
) -> None:
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
