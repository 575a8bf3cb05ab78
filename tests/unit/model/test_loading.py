"""Which models are taken, what is said about them, and how others are refused."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig

from kvferry.proto.errors import ModelError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.worker.model.config import layer_groups
from kvferry.worker.model.folder import weight_digest
from kvferry.worker.model.loading import inspect_model, load_model

MakeModel = Callable[..., Path]


@pytest.fixture
def folder(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Qwen2 that a test may damage."""
    return Path(shutil.copytree(tiny_models["qwen2"], tmp_path / "tiny"))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_the_facts_are_those_of_the_config_and_the_identity_those_of_the_bytes(
    folder: Path,
) -> None:
    facts = inspect_model(str(folder), dtype="bfloat16")
    assert facts.folder == folder
    assert facts.vocab_size == 61
    assert facts.max_model_len == 64
    assert facts.eos_token_ids == (2,)
    assert facts.tokenizer.convert_tokens_to_ids(["w7"]) == [7]
    rope = '{"max_position_embeddings": 64, "rope_theta": 10000.0, "rope_type": "default"}'
    assert facts.identity == Identity(
        model="tiny",
        weight_version=weight_digest(folder),
        weight_dtype="bfloat16",
        kv_dtype="bfloat16",
        kv_scales="",
        rope=rope,
        num_layers=2,
        num_kv_heads=2,
        head_size=8,
        groups=(GroupSpec(kind="full", layers=(0, 1)),),
    )


def test_a_head_size_that_does_not_follow_from_the_hidden_size_is_read(
    tiny_models: dict[str, Path],
) -> None:
    facts = inspect_model(str(tiny_models["qwen3"]))
    assert (facts.head_size, facts.identity.head_size) == (16, 16)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_a_loaded_model_has_the_dtype_asked_for_and_the_facts_of_inspection(
    tiny_models: dict[str, Path], kind: str
) -> None:
    path = str(tiny_models[kind])
    loaded = load_model(path, dtype="bfloat16")
    facts = inspect_model(path, dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert load_model(path).model.dtype == torch.float32
    assert not loaded.model.training
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.identity) == (
        facts.num_layers,
        facts.num_kv_heads,
        facts.identity,
    )


def test_end_tokens_of_both_config_files_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 5]}')
    assert inspect_model(str(folder)).eos_token_ids == (2, 5, 9)


def test_the_digest_follows_the_weights_content_and_nothing_else(folder: Path) -> None:
    before = weight_digest(folder)
    assert len(bytes.fromhex(before)) == 16
    change_config(folder, use_cache=False)
    assert weight_digest(folder) == before
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weight_digest(folder) != before


def test_the_digest_tells_apart_where_one_file_ends_and_the_next_starts(tmp_path: Path) -> None:
    digests = []
    for first, second in ((b"ab", b"c"), (b"a", b"bc")):
        (tmp_path / "a.safetensors").write_bytes(first)
        (tmp_path / "b.safetensors").write_bytes(second)
        digests.append(weight_digest(tmp_path))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("given", ["/nowhere/at/all", "no-such-model", "./a/b", "a/b/c", ""])
def test_a_missing_folder_is_refused_without_asking_the_hub(given: str) -> None:
    with pytest.raises(ModelError, match=r"no such model; given: .*allowed: an existing folder"):
        inspect_model(given)


def test_a_hub_id_that_cannot_be_fetched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"hub gives us .*given: kvferry-tests/none-such"):
        inspect_model("kvferry-tests/none-such")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "unsupported model_type; given: gpt2; allowed: .*'llama'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised.*quant_method=awq"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            r"attention layer; given: \['chunked_attention'\]; allowed: .*'sliding_attention'",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention layers need a sliding_window; allowed: >= 1",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "unsupported rope_type; given: dynamic; allowed: .*'llama3'",
        ),
        ({"hidden_size": "wide"}, "config.json is not valid"),
    ],
)
def test_a_config_that_the_paged_attention_would_get_wrong_is_refused(
    folder: Path, changes: dict[str, object], said: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=said):
        inspect_model(str(folder))


def test_a_sliding_window_that_no_layer_uses_makes_no_group(make_model: MakeModel) -> None:
    path = make_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert inspect_model(str(path)).identity.groups == (GroupSpec(kind="full", layers=(0, 1)),)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            r"given: \['sliding_attention'\]; allowed: \['full_attention'\]",
        ),
        ("gemma3_text", {"sliding_window": 0}, "need a sliding_window; given: 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "softcapping is not .*given: 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional_attention is not"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "unsupported rope_type; given: dynamic",
        ),
    ],
)
def test_layers_that_would_be_computed_in_another_way_than_the_config_says_are_refused(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    changes: dict[str, object],
    said: str,
) -> None:
    folder = Path(shutil.copytree(tiny_models[kind], tmp_path / "tiny"))
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=said):
        inspect_model(str(folder))


def test_a_hybrid_identity_names_its_groups_and_the_rope_of_each_type_of_layer(
    tiny_hybrid_model: Path,
) -> None:
    identity = inspect_model(str(tiny_hybrid_model)).identity
    assert identity.groups == (
        GroupSpec(kind="sliding_window", layers=(0, 3), window_tokens=40),
        GroupSpec(kind="sliding_window", layers=(1, 4), window_tokens=40),
        GroupSpec(kind="full", layers=(2, 5)),
    )
    assert json.loads(identity.rope) == {
        "max_position_embeddings": 8192,
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert (identity.num_kv_heads, identity.head_size) == (2, 8)


FULL_LAYER, WINDOW_LAYER = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        ("ff", [("f", (0, 1))]),
        ("sss", [("s", (0, 1, 2))]),
        ("fs", [("f", (0,)), ("s", (1,))]),
        ("sfff", [("s", (0,)), ("f", (1,)), ("f", (2,)), ("f", (3,))]),
        ("sfsfs", [("s", (0, 4)), ("s", (2,)), ("f", (1, 3))]),
        ("ssfssfss", [("s", (0, 4)), ("s", (1, 6)), ("s", (3, 7)), ("f", (2, 5))]),
        # 4 are less than 1.5 times 3, so the group of 3 is taken as one of 4.
        ("fsfsfsf", [("f", (0, 2, 4, 6)), ("s", (1, 3, 5))]),
    ],
)
def test_the_rarer_kind_of_layer_is_one_group_and_sets_the_size_of_the_others(
    pattern: str, groups: list[tuple[str, tuple[int, ...]]]
) -> None:
    make_config: Any = Gemma3TextConfig
    config = make_config(
        num_hidden_layers=len(pattern),
        layer_types=[FULL_LAYER if letter == "f" else WINDOW_LAYER for letter in pattern],
        sliding_window=8,
    )
    assert layer_groups(config) == tuple(
        GroupSpec(kind="full", layers=layers)
        if letter == "f"
        else GroupSpec(kind="sliding_window", layers=layers, window_tokens=8)
        for letter, layers in groups
    )


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not readable"):
        inspect_model(str(folder))


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("config.json", "it has no config.json"),
        ("model.safetensors", "holds no weights; .*allowed: \\*.safetensors"),
        ("tokenizer.json", "holds no tokenizer; .*allowed: .*'tokenizer.json'"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(folder: Path, removed: str, said: str) -> None:
    (folder / removed).unlink()
    with pytest.raises(ModelError, match=said):
        inspect_model(str(folder))


def test_weights_that_do_not_cover_the_model_are_refused_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack tensors.*given: \['model.norm.weight'\]"):
        load_model(str(folder))


def test_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="the weights cannot be loaded"):
        load_model(str(folder))


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        inspect_model(str(folder))


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"given: int8; allowed: .*'float32', 'bfloat16'"):
        load_model(str(folder), dtype="int8")


def test_models_are_loaded_by_several_threads_at_once_and_tied_weights_stay_tied(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def is_tied(_: int) -> bool:
        model: Any = load_model(str(folder)).model
        return model.lm_head.weight is model.model.embed_tokens.weight

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(is_tied, range(24)))
    assert is_tied(0)
