"""Fixtures shared by all levels, and the wall between unit tests and Ray."""

import os
from pathlib import Path
from typing import Any

import pytest

# A parent's settings must not decide what a test sees.
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("GRPC_VERBOSITY", "error")

UNIT = Path(__file__).parent / "unit"


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test that starts Ray is in the wrong folder."""
    if UNIT in request.path.parents:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("unit tests run without Ray")

        monkeypatch.setattr("ray.init", refuse)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of single bytes: every real code path, quickly."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    bytes_only: Any = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    make_tokenizer: Any = PreTrainedTokenizerFast
    make_tokenizer(tokenizer_object=bytes_only, eos_token="<end>").save_pretrained(folder)
    make_config: Any = LlamaConfig
    config = make_config(
        vocab_size=len(vocab),
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
    torch.manual_seed(0)
    make_model: Any = LlamaForCausalLM
    make_model(config).save_pretrained(folder)
    return folder
