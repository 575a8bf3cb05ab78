"""Reading a model's config, and refusing what the paged attention would get wrong."""

import json
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from kvferry.proto.errors import ModelError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
# "dynamic" and "longrope" turn old keys by an angle that depends on the sequence's later length,
# so blocks of one prefix would not be interchangeable.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the checked config of a model folder.

    Raises:
        ModelError: it is not readable, of another model type, quantised, or uses sliding-window
            layers or a rope whose angles depend on the sequence's length.
    """
    try:
        plain = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"config.json is not readable ({error})", given=str(folder)) from error
    # Looked at before transformers does: its message for a type it does not know lists hundreds.
    model_type = plain.get("model_type") if isinstance(plain, dict) else None
    if model_type not in MODEL_TYPES:
        raise ModelError("unsupported model_type", given=model_type, allowed=list(MODEL_TYPES))
    # The config classes validate with errors of huggingface_hub that share no base but Exception.
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(f"config.json is not valid ({error})", given=str(folder)) from error
    _require_supported(config)
    return config


def rope_text(config: PreTrainedConfig) -> str:
    """Return everything that the rope angles are computed from, as canonical JSON."""
    settings = {
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope_parameters,
    }
    return json.dumps(settings, sort_keys=True)


def eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the sorted ids that end a text, by the config and by generation_config.json.

    Chat models often name their end-of-turn token in the latter only.

    Raises:
        ModelError: generation_config.json is there but not readable.
    """
    named = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"generation_config.json is not valid ({error})", given=str(folder)
            ) from error
        named.append(generation.eos_token_id)
    ids: set[int] = set()
    for entry in named:
        if isinstance(entry, int):
            ids.add(entry)
        elif entry is not None:
            ids.update(entry)
    return tuple(sorted(ids))


def _require_supported(config: PreTrainedConfig) -> None:
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        raise ModelError(
            "quantised weights are not supported", given=quantisation, allowed="plain weights"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ModelError(
            "unsupported kind of attention layer", given=sorted(kinds), allowed=["full_attention"]
        )
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ModelError("unsupported rope_type", given=rope_type, allowed=list(ROPE_TYPES))
