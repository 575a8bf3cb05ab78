"""What a plan must know of a model: given as numbers, or read from its folder."""

from dataclasses import dataclass

from kvferry.proto.identity import GroupSpec
from kvferry.proto.placement import KvShape

DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupToMove:
    """What is cached of a token in one group, and which part of a prefix the group needs."""

    shape: KvShape
    spec: GroupSpec

    def first_position(self, num_tokens: int, virtual_block_tokens: int) -> int:
        """Return the first position that tokens after the prefix of `num_tokens` still need.

        It is where one of the destination's blocks begins; with a window it may be late.
        """
        num_blocks = num_tokens // virtual_block_tokens
        if num_blocks == 0:
            return 0
        return self.spec.first_needed_block(num_blocks, virtual_block_tokens) * virtual_block_tokens


def one_full_group(shape: KvShape) -> list[GroupToMove]:
    """Return the only group of a model whose layers all have full attention."""
    return [GroupToMove(shape=shape, spec=GroupSpec(kind="full", layers=shape.layers))]


def groups_of_model(path_or_hub_id: str, dtype: str | None) -> list[GroupToMove]:
    """Return the groups of a model folder; only its config is read.

    Args:
        path_or_hub_id: a folder in Hugging Face form, or a hub id of the form owner/name.
        dtype: of the KV cache; None for the config's own.

    Raises:
        ModelError: it is not there, not readable or of a kind that the reference engine lacks.
        ConfigError: a dtype of unknown size.
    """
    # Only now what imports transformers, and takes seconds to import.
    from kvferry.worker.model.config import head_size_of, layer_groups, read_config
    from kvferry.worker.model.folder import find_model_folder

    config = read_config(find_model_folder(path_or_hub_id))
    own_dtype = getattr(config, "dtype", None) or DEFAULT_DTYPE
    return [
        GroupToMove(
            spec=spec,
            shape=KvShape(
                num_layers=config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                num_query_heads=config.num_attention_heads,
                head_size=head_size_of(config),
                dtype=dtype or str(own_dtype).removeprefix("torch."),
                group_kind=spec.kind,
                group_layers=tuple(sorted(spec.layers)),
            ),
        )
        for spec in layer_groups(config)
    ]
