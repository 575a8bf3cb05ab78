"""A layout with a model in it: what each rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import GroupKind, Identity
from kvferry.proto.ids import FIRST_GROUP, GroupId
from kvferry.proto.layout import Layout
from kvferry.proto.specs import DTYPE_BYTES, require_integer, require_one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What is cached of one token, in the layers of one group of a model.

    `group_layers` are the group's layers in ascending order; empty for all `num_layers` of the
    model. MLA keeps one latent vector instead of keys and values: one side, one KV head.
    `head_size` is in elements. `num_query_heads` is needed for one of vLLM's rules only, and 0
    where it is not known.

    Raises:
        ConfigError: a size that is no integer of at least 1, an unknown dtype, layers that the
            model does not have, or MLA with several heads.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    mla: bool = False
    num_query_heads: int = 0
    group_kind: GroupKind = "full"
    group_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_size"):
            require_integer(name, getattr(self, name), at_least=1)
        require_integer("num_query_heads", self.num_query_heads, at_least=0)
        require_one_of("dtype", self.dtype, tuple(DTYPE_BYTES))
        if self.mla and self.num_kv_heads != 1:
            raise ConfigError("MLA has one KV head", given=self.num_kv_heads, allowed=1)
        layers = self.group_layers
        if list(layers) != sorted(set(layers) & set(range(self.num_layers))):
            raise ConfigError(
                "a group's layers are layers of the model, in ascending order",
                given=list(layers),
                allowed=f"0 to {self.num_layers - 1}",
            )

    @property
    def num_sides(self) -> int:
        """2 for keys and values, 1 for the latent alone."""
        return 1 if self.mla else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's values of one token, in one layer and side."""
        return self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def layers(self) -> tuple[int, ...]:
        """The group's layers as layers of the model."""
        return self.group_layers or tuple(range(self.num_layers))


def shape_of(identity: Identity, group_id: GroupId = FIRST_GROUP) -> KvShape:
    """Return what is cached of a token in one group of an identity.

    Raises:
        ConfigError: no such group, or a KV dtype of unknown size.
    """
    if not 0 <= group_id < len(identity.groups):
        raise ConfigError(
            "no such group of layers", given=group_id, allowed=list(range(len(identity.groups)))
        )
    group = identity.groups[group_id]
    return KvShape(
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        head_size=identity.head_size,
        dtype=identity.kv_dtype,
        group_kind=group.kind,
        group_layers=tuple(sorted(group.layers)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds: these layers and heads of the tokens of one shard.

    `layers` counts within the group (all layers, where the model has one group); the rank's k-th
    layer of the group is `layers[k]`. It is empty for a stage without layers of the group.
    """

    rank: int
    layers: range
    heads: range
    token_shard: int


def holdings(layout: Layout, shape: KvShape) -> tuple[Holding, ...]:
    """Return what each rank holds, rank 0 first.

    Raises:
        ConfigError: the layout's stages or head shards do not fit the model.
    """
    stages, heads = layout.stages(shape.num_layers), layout.heads(shape.num_kv_heads)
    in_stage = [_within(shape.layers, stage) for stage in stages]
    places = [layout.place(rank) for rank in range(layout.num_ranks)]
    return tuple(
        Holding(
            rank=rank,
            layers=in_stage[place.stage],
            heads=heads[place.head_shard],
            token_shard=place.token_shard,
        )
        for rank, place in enumerate(places)
    )


def require_full_where_dealt(layout: Layout, groups: Sequence[KvShape]) -> None:
    """Refuse to deal the tokens of windows, chunks and states over ranks of their own.

    Plans could be made of such a layout, but caches cannot: what a group with a window keeps is
    told in whole blocks. What vLLM deals is `vllm_rules`' matter.

    Raises:
        ConfigError: a layout of kind grid with several token shards, and a group that is not full.
    """
    if layout.kind != "grid" or layout.token_shards == 1:
        return
    for shape in groups:
        if shape.group_kind != "full":
            raise ConfigError(
                f"tokens of layers of kind {shape.group_kind} are not dealt over ranks",
                given={"dcp": layout.dcp, "pcp": layout.pcp},
                allowed={"kind": "full", "otherwise": "dcp 1 and pcp 1"},
            )


def _within(layers: tuple[int, ...], stage: range) -> range:
    before = sum(layer < stage.start for layer in layers)
    return range(before, before + sum(layer in stage for layer in layers))
