"""How large an instance's pool is to be, and what follows from it for its requests."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvferry.coordinator.sizing import CacheOptions, WorkerMemory, plan_cache
from kvferry.proto.errors import ConfigError, InvariantError
from kvferry.proto.group_specs import spec_of_group
from kvferry.proto.identity import Identity
from kvferry.proto.layout import Layout
from kvferry.proto.messages import InstanceInfo
from kvferry.proto.specs import RequestLimits

LengthLimit = int | Literal["auto"] | None
"""Most tokens of a request: a number; `auto`, the longest that fits; None, the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """How an instance's pool is sized: exactly one of three.

    `num_blocks`: so many blocks, the null block included. `kv_bytes`: as many blocks as so many
    bytes hold. `memory_fraction`: the share of its device's memory that each rank may take; what it
    was measured to take beside the pool is taken off. Ranks that share a device share its memory,
    so their fractions have to add up to 1 at most. All are of each rank.

    Raises:
        ConfigError: none or several are given, or a value is out of range.
    """

    num_blocks: int | None = None
    kv_bytes: int | None = None
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if len(given) != 1:
            raise ConfigError(
                "one setting says how large the pool is",
                given=given or "none",
                allowed="one of num_blocks, kv_bytes, memory_fraction",
            )
        for name, smallest in (("num_blocks", 2), ("kv_bytes", 1)):
            value: Any = given.get(name, smallest)
            if type(value) is not int or value < smallest:
                raise ConfigError(
                    f"{name} must be an integer of at least {smallest}",
                    given=value,
                    allowed=f">= {smallest}",
                )
        fraction: Any = given.get("memory_fraction", 1)
        if type(fraction) not in (int, float) or not 0 < fraction <= 1:
            raise ConfigError(
                "memory_fraction is no fraction", given=fraction, allowed="above 0, at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool and the requests it is for.

    `num_blocks` includes the null block; `block_bytes` is what one takes in a rank's layers.
    `max_model_len`: tokens that a request may have; of a pool of a given number of blocks that may
    be more than fit, and then each request is checked by itself. `fitting_tokens`: tokens up to
    which every request fits; `concurrency`: how many requests of that length fit at once.
    """

    num_blocks: int
    block_bytes: int
    max_model_len: int
    fitting_tokens: int
    concurrency: float

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.block_bytes} bytes, "
            f"room for {self.concurrency:.2f} requests of {self.fitting_tokens} tokens at once"
        )


def plan_pool(
    identity: Identity,
    *,
    who: str,
    layout: Layout,
    token_budget: int,
    model_len: int,
    max_model_len: LengthLimit = None,
    num_blocks: int | None = None,
    kv_bytes: int = 0,
) -> PoolPlan:
    """Plan a pool of `num_blocks` blocks or, where that is None, of at most `kv_bytes` bytes.

    A pool that is sized in bytes, or for a length that was asked for, has room for one request of
    the greatest length at least.

    Args:
        identity: of the model; its groups are those that `kvferry.coordinator.grouping` makes.
        who: the instance, for errors.
        layout: of the instance; every rank holds all layers and heads.
        token_budget: tokens of a forward pass.
        model_len: tokens that the model has positions for.
        max_model_len: tokens that a request is to be bounded to.
        num_blocks: null block included.
        kv_bytes: bytes for KV on each rank; without any (or less than none) the pool is refused.

    Raises:
        ConfigError: one request of the greatest length does not fit (`allowed` has the longest that
            would), not even one token does, or `max_model_len` is beyond the model's.
    """
    if isinstance(max_model_len, int) and max_model_len > model_len:
        raise ConfigError(
            "max_model_len is beyond the model's limit",
            given=max_model_len,
            allowed=f"<= {model_len}, or auto",
        )
    longest = max_model_len if isinstance(max_model_len, int) else model_len
    checked_one_by_one = num_blocks is not None and max_model_len is None
    # As if one device had the memory of all ranks that tokens are dealt over.
    memory = WorkerMemory(
        name=who,
        layers=_layers(identity, layout.virtual_block_tokens),
        available_bytes=kv_bytes * layout.token_shards,
    )
    options = CacheOptions(
        limits=RequestLimits(max_model_len=longest, max_in_flight_tokens=token_budget),
        num_blocks=num_blocks,
        fit_length=checked_one_by_one or max_model_len == "auto",
    )
    plan = plan_cache([memory], options)
    planned = tuple(group.layers for group in plan.workers[0].groups)
    known = tuple(tuple(map(_layer_name, group.layers)) for group in identity.groups)
    if planned != known or plan.concurrency is None:
        raise InvariantError(
            "the groups of layers are not those that the cache is planned in",
            given=[list(layers) for layers in known],
            allowed=[list(layers) for layers in planned],
        )
    return PoolPlan(
        num_blocks=plan.num_blocks,
        block_bytes=identity.block_bytes(layout.block_tokens),
        max_model_len=model_len if checked_one_by_one else plan.max_model_len,
        fitting_tokens=plan.max_model_len,
        concurrency=plan.concurrency,
    )


def pool_of(info: InstanceInfo) -> PoolPlan:
    """Return the pool of an engine that has registered."""
    return plan_pool(
        info.identity,
        who=info.instance_id,
        layout=info.layout,
        token_budget=info.max_in_flight_tokens,
        model_len=info.max_model_len,
        num_blocks=info.num_blocks,
    )


def _layers(identity: Identity, block_tokens: int) -> dict[str, Any]:
    spec_of_layer = {
        layer: spec_of_group(identity, group, block_tokens)
        for group in identity.groups
        for layer in group.layers
    }
    return {_layer_name(layer): spec_of_layer[layer] for layer in range(identity.num_layers)}


def _layer_name(layer: int) -> str:
    return f"layers.{layer}"
