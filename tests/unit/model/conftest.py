"""Tiny models of every supported kind, with random weights, saved as Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 61
# Any: transformers' constructors are typed in parts only.
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
OF_KIND: dict[str, dict[str, object]] = {
    # Their head size does not follow from the hidden size.
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "tie_word_embeddings": False,
    },
}

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return a function that saves a tiny model of a kind, with config values of one's choice."""

    def make(kind: str, **changes: object) -> Path:
        config_class, model_class = CLASSES[kind]
        values: dict[str, object] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            # Large enough that a wrong key moves the logits far beyond the tolerance.
            "initializer_range": 0.3,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
        }
        values |= OF_KIND.get(kind, {})
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        model_class(config_class(**values | changes)).save_pretrained(folder)
        words = {f"w{index}": index for index in range(VOCAB_SIZE)}
        fast_tokenizer: Any = PreTrainedTokenizerFast
        tokenizer = fast_tokenizer(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_models(make_model: MakeModel) -> dict[str, Path]:
    """One folder per supported kind."""
    return {kind: make_model(kind) for kind in CLASSES}
