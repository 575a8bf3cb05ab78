"""Adapters never share blocks with one another or with the plain model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.engines.conftest import Service, tokens
from tests.engines.engines import connector, running_engines

PROMPT = tokens(3, 100)
RANK = 4


def adapter(folder: Path, seed: int) -> str:
    """Write a random adapter for the demo's model."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, 576, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(576, RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_adapter_finds_its_own_blocks_only_also_under_a_name_used_before(
    model: Path, service: Service, tmp_path: Path
) -> None:
    settings = {
        "kv_transfer_config": connector(service.address),
        "enable_prefix_caching": False,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 1,
    }
    first, second = adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    with running_engines(model, settings) as (engine,):

        def cached(*lora: str | int) -> int:
            fields: dict[str, Any] = {"lora": lora} if lora else {}
            (found,) = engine.generate(PROMPT, **fields)
            return int(found["num_cached_tokens"])

        assert cached() == 0
        service.wait_cached_blocks(6)
        assert cached("x", 1, first) == 0
        service.wait_cached_blocks(12)
        assert cached("x", 2, second) == 0
        service.wait_cached_blocks(18)
        assert [cached(), cached("x", 1, first), cached("x", 2, second)] == [96, 96, 96]
