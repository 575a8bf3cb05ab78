"""What tells the blocks of one LoRA adapter from those of another."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cluster.connectors.vllm_requests import keys_of
from kvferry.proto.errors import ModelError
from kvferry.proto.extra_keys import LoraKey


def request(path: Path) -> Any:
    return SimpleNamespace(
        prompt_embeds=None,
        lora_request=SimpleNamespace(lora_name="a", lora_path=str(path)),
        cache_salt="",
        mm_features=[],
    )


def version(path: Path) -> str:
    keys = keys_of(request(path))
    assert keys is not None
    assert keys.lora is not None
    assert keys.lora == LoraKey(name="a", path="", version=keys.lora.version)
    return keys.lora.version


def test_an_adapter_is_known_by_its_files_wherever_they_lie(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("one", "copy", "other"))
    for folder, weights in ((one, b"w"), (copy, b"w"), (other, b"v")):
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(b"{}")
        (folder / "adapter_model.safetensors").write_bytes(weights)
    assert version(one) == version(copy)
    assert version(one) != version(other)
    assert version(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")


def test_an_adapter_whose_files_vanish_while_they_are_read_is_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"w")

    def vanished(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", vanished)
    with pytest.raises(ModelError, match="cannot be read"):
        keys_of(request(tmp_path))
