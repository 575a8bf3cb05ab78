"""Reading a model's config, and refusing what the paged attention would get wrong."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from kvferry.proto.errors import ModelError
from kvferry.proto.identity import GroupSpec

MODEL_TYPES = ("llama", "qwen2", "qwen3", "gemma3_text")
# transformers ignores the layer types of a Llama, so a window named there would be ours alone.
_LAYER_TYPES = {
    "llama": ("full_attention",),
    "qwen2": ("full_attention", "sliding_attention"),
    "qwen3": ("full_attention", "sliding_attention"),
    "gemma3_text": ("full_attention", "sliding_attention"),
}
# "dynamic" and "longrope" turn old keys by an angle that depends on the sequence's later length,
# so blocks of one prefix would not be interchangeable.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Up to this many times the layers of the smaller kind, padding that kind wastes less than
# splitting the larger one.
PADDED_UP_TO = 1.5


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the checked config of a model folder.

    Raises:
        ModelError: it is not readable, of another model type, quantised, or uses kinds of attention
            that the paged attention does not have, or a rope whose angles depend on the sequence's
            length.
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
    """Return everything that the rope angles are computed from, as canonical JSON.

    Where each type of layer has a rope of its own, all of them are named.
    """
    settings = {
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope_parameters,
    }
    return json.dumps(settings, sort_keys=True)


def head_size_of(config: PreTrainedConfig) -> int:
    """Return the number of values of one head's key, which some configs leave to be worked out."""
    named: int | None = getattr(config, "head_dim", None)
    return named or config.hidden_size // config.num_attention_heads


def layer_groups(config: PreTrainedConfig) -> tuple[GroupSpec, ...]:
    """Return the groups that the layers of a checked config form, as vLLM 0.32 forms them.

    A kind of layers is dealt, layer by layer, to as many groups as its number takes. A group has as
    many layers as the kind with fewer of them; or as the other kind, if that has hardly more. (Of 2
    full and 4 sliding-window layers: one group and two.) The kind of layer 0 comes first. Sizing a
    pool refuses a model whose groups are not those that the coordinator's rule makes.
    """
    of_kind: dict[str, list[int]] = {}
    for layer, kind in enumerate(_layer_types(config)):
        of_kind.setdefault(kind, []).append(layer)
    fewest, most = min(map(len, of_kind.values())), max(map(len, of_kind.values()))
    size = most if most < fewest * PADDED_UP_TO else fewest
    return tuple(
        _group(kind, layers, config)
        for kind, all_layers in of_kind.items()
        for layers in _dealt(all_layers, size)
    )


def _group(kind: str, layers: tuple[int, ...], config: PreTrainedConfig) -> GroupSpec:
    if kind == "full_attention":
        return GroupSpec(kind="full", layers=layers)
    return GroupSpec(kind="sliding_window", layers=layers, window_tokens=config.sliding_window)


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
    _require_supported_attention(config)
    for rope in _ropes(config):
        rope_type = rope.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ModelError("unsupported rope_type", given=rope_type, allowed=list(ROPE_TYPES))


def _require_supported_attention(config: PreTrainedConfig) -> None:
    types = set(_layer_types(config))
    allowed = _LAYER_TYPES[config.model_type]
    if not types <= set(allowed):
        raise ModelError(
            "unsupported kind of attention layer",
            given=sorted(types - set(allowed)),
            allowed=list(allowed),
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types and (window is None or window < 1):
        raise ModelError(
            "sliding_attention layers need a sliding_window", given=window, allowed=">= 1"
        )
    # Settings of Gemma's: the one would let a token see later ones, the other is read by
    # transformers but not applied, so that nobody could tell which output is right.
    for name in ("use_bidirectional_attention", "attn_logit_softcapping"):
        value = getattr(config, name, None)
        if value:
            raise ModelError(f"{name} is not supported", given=value, allowed="unset")


def _layer_types(config: PreTrainedConfig) -> list[str]:
    types: list[str] | None = getattr(config, "layer_types", None)
    return types or ["full_attention"] * config.num_hidden_layers


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rope settings, those of each type of layer where they differ by type."""
    settings: dict[str, Any] = config.rope_parameters or {}
    by_layer_type = [value for value in settings.values() if isinstance(value, dict)]
    return by_layer_type or [settings]


def _dealt(layers: list[int], size: int) -> list[tuple[int, ...]]:
    num_groups = -(-len(layers) // size)
    return [tuple(layers[first::num_groups]) for first in range(num_groups)]
