"""Loading Hugging Face decoder models of the kinds that the paged attention is right for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as _logging

from kvferry.proto.errors import ModelError
from kvferry.proto.identity import Identity
from kvferry.worker.dtypes import TORCH_DTYPES
from kvferry.worker.model.attention import PAGED_ATTENTION
from kvferry.worker.model.config import (
    eos_token_ids,
    head_size_of,
    layer_groups,
    read_config,
    rope_text,
)
from kvferry.worker.model.folder import find_model_folder, model_name, weight_digest

# Parts of transformers are not typed.
transformers_logging: Any = _logging
auto_model: Any = AutoModelForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What one can say of a model without loading its weights.

    `max_model_len` is in tokens (prompt and output together); `eos_token_ids` is sorted and may be
    empty; `identity` is that of weights and KV cache in the dtype asked for.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    identity: Identity


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelFacts):
    """A model in evaluation mode on the CPU, wired to the paged attention."""

    model: PreTrainedModel


def inspect_model(path_or_hub_id: str, *, dtype: str = "float32") -> ModelFacts:
    """Read a model's config, tokenizer and weight digest, but load no weights.

    Args:
        path_or_hub_id: a folder in Hugging Face form, or a hub id of the form owner/name.
        dtype: float32, bfloat16 or float16, for the weights and the KV cache.

    Raises:
        ModelError: the model is not there, not readable or of an unsupported kind; or the dtype.
    """
    if dtype not in TORCH_DTYPES:
        raise ModelError("unsupported dtype", given=dtype, allowed=list(TORCH_DTYPES))
    folder = find_model_folder(path_or_hub_id)
    config = read_config(folder)
    head_size = head_size_of(config)
    identity = Identity(
        model=model_name(path_or_hub_id, folder),
        weight_version=weight_digest(folder),
        weight_dtype=dtype,
        kv_dtype=dtype,
        kv_scales="",
        rope=rope_text(config),
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        groups=layer_groups(config),
    )
    return ModelFacts(
        folder=folder,
        tokenizer=_read_tokenizer(folder),
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=eos_token_ids(folder, config),
        identity=identity,
    )


def load_model(path_or_hub_id: str, *, dtype: str = "float32") -> LoadedModel:
    """Load a model for the paged attention.

    Args:
        path_or_hub_id: a folder in Hugging Face form, or a hub id of the form owner/name.
        dtype: float32, bfloat16 or float16, whatever dtype the weights are stored in.

    Raises:
        ModelError: as `inspect_model`, or the weights are damaged or do not cover the model.
    """
    facts = inspect_model(path_or_hub_id, dtype=dtype)
    return LoadedModel(model=_read_model(facts.folder, TORCH_DTYPES[dtype]), **vars(facts))


# transformers changes its own classes while it loads a model, and two at once leave them changed:
# tied weights then are not tied any more, in this process, for good.
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def progress_bars_off() -> Iterator[None]:
    """Keep transformers' progress bars out of the logs of processes that nobody looks at."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _read_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    # transformers and safetensors raise many kinds of errors (some derive from Exception alone)
    # for files that are damaged or do not fit the config.
    try:
        with _ONE_AT_A_TIME, progress_bars_off():
            model, info = auto_model.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=PAGED_ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(
            f"the weights cannot be loaded ({type(error).__name__}: {error})", given=str(folder)
        ) from error
    # transformers fills missing weights with random numbers and only logs it.
    if info["missing_keys"]:
        raise ModelError(
            "the weight files lack tensors of the model", given=sorted(info["missing_keys"])
        )
    loaded: PreTrainedModel = model
    return loaded


def _read_tokenizer(folder: Path) -> Any:
    # Without any of these, transformers makes a tokenizer with an empty vocabulary.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            "the model folder holds no tokenizer", given=str(folder), allowed=list(TOKENIZER_FILES)
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises plain Exception for a file it cannot parse.
    except Exception as error:
        raise ModelError(
            f"the tokenizer cannot be read ({type(error).__name__}: {error})",
            given=str(folder),
        ) from error
