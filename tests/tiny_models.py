"""Model folders made from nothing: random weights, and a tokenizer of single bytes."""

from pathlib import Path
from typing import Any

HYBRID_WINDOW_TOKENS = 40
"""Window of the hybrid's sliding layers: no multiple of a usual block, so its edge cuts blocks."""


def save_tiny_llama(folder: Path) -> None:
    """Save a Llama of 2 layers: every real code path, quickly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = _save_byte_tokenizer(folder)
    make_config: Any = LlamaConfig
    config = make_config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
    )
    _save_random(LlamaForCausalLM, config, folder)


def save_tiny_hybrid(folder: Path) -> None:
    """Save a Gemma 3 of 6 layers, the third and the last with full attention, 4 with a window.

    Its greedy texts neither repeat themselves nor hang on near ties, and both kinds of layers
    decide them: what is wrong in either shows.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    vocab_size = _save_byte_tokenizer(folder)
    make_config: Any = Gemma3TextConfig
    config = make_config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=HYBRID_WINDOW_TOKENS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        # Keys and queries are normalised: only this makes attention choose, not average.
        query_pre_attn_scalar=2,
        max_position_embeddings=8192,
        # Tied to the input, the output would repeat the last token.
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    _save_random(Gemma3ForCausalLM, config, folder)


def _save_byte_tokenizer(folder: Path) -> int:
    """Save a tokenizer whose token 0 ends a text, and return the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    bytes_only: Any = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    make_tokenizer: Any = PreTrainedTokenizerFast
    make_tokenizer(tokenizer_object=bytes_only, eos_token="<end>").save_pretrained(folder)
    return len(vocab)


def _save_random(model_class: Any, config: Any, folder: Path) -> None:
    import torch

    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
