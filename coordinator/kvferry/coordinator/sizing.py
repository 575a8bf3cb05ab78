"""From device memory to the number of blocks all workers agree on, and the tensors that hold them.

Workers may differ in layers (stages of a pipeline) and in memory, but a block id must exist on each
of them: the worker with the fewest blocks decides. A cache in which the longest request would wait
for ever is refused here, before anything is allocated.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from kvferry.coordinator.cache_groups import CacheGroup
from kvferry.coordinator.cache_tensors import CacheTensor, lay_out_tensors
from kvferry.coordinator.grouping import group_layers
from kvferry.proto.errors import ConfigError
from kvferry.proto.specs import (
    LayerSpec,
    MemoryOrder,
    RequestLimits,
    require_integer,
    require_one_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """One worker's layers, by name in the model's order, and its bytes for the KV cache."""

    name: str
    layers: Mapping[str, LayerSpec]
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How to size a cache.

    `num_blocks` gives the number of blocks instead of deriving it from the memory. `fit_length`
    lowers `limits.max_model_len` to the longest request that fits. `hybrid` off treats local layers
    as full ones.

    Raises:
        ConfigError: `num_blocks` is no positive integer, or the memory order is unknown or not one
            that the profile has.
    """

    limits: RequestLimits
    order: MemoryOrder = "LBHNC"
    hybrid: bool = True
    num_blocks: int | None = None
    fit_length: bool = False

    def __post_init__(self) -> None:
        if self.num_blocks is not None:
            require_integer("num_blocks", self.num_blocks, at_least=1)
        orders = get_args(MemoryOrder) if self.limits.profile == "0.32" else ("LBHNC",)
        require_one_of("memory order", self.order, orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What one worker allocates, and its share of every group."""

    name: str
    groups: tuple[CacheGroup, ...]
    tensors: tuple[CacheTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The agreed cache of one instance.

    `num_blocks` counts the null block. `concurrency` is the number of requests of `max_model_len`
    tokens that the blocks suffice for; None without cached layers.
    """

    num_blocks: int
    max_model_len: int
    concurrency: float | None
    workers: tuple[WorkerPlan, ...]

    @property
    def group_specs(self) -> tuple[LayerSpec, ...]:
        """One spec per group, as the groups of a `CacheConfig`: blocks are those of one rank.

        Workers differ in the layers they hold of a group, not in the rules of its block table.
        """
        return tuple(group.scheduler_spec for group in self.workers[0].groups)


def kv_cache_bytes(total_bytes: int, fraction: float, peak_bytes: int) -> int:
    """Return what a fraction of the device memory leaves for the KV cache; may be negative.

    `peak_bytes` is the most that everything else (weights, activations) was measured to take.

    Raises:
        ConfigError: the fraction is not above 0 and at most 1, or a size is negative.
    """
    if isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ConfigError("no fraction of the memory", given=fraction, allowed="above 0, at most 1")
    require_integer("total_bytes", total_bytes, at_least=0)
    require_integer("peak_bytes", peak_bytes, at_least=0)
    return int(total_bytes * fraction) - peak_bytes


def plan_cache(workers: Sequence[WorkerMemory], options: CacheOptions) -> CachePlan:
    """Group the layers, agree on a number of blocks, and lay out every worker's tensors.

    Raises:
        ConfigError: no or too little memory (naming the worker, what is needed, and the longest
            request that would fit), layers that cannot be grouped, or workers that contradict each
            other.
    """
    if not workers:
        raise ConfigError("an instance needs at least one worker", given=0, allowed=">= 1")
    limits = options.limits
    layers = _all_layers(workers)
    groups = group_layers(
        layers, profile=limits.profile, order=options.order, hybrid=options.hybrid
    )
    if not groups:
        # The pool needs its null block even when nothing is cached.
        plans = tuple(WorkerPlan(name=each.name, groups=(), tensors=()) for each in workers)
        return CachePlan(
            num_blocks=1, max_model_len=limits.max_model_len, concurrency=None, workers=plans
        )
    shares = [_Share.of(worker, groups, options) for worker in workers]
    if options.fit_length:
        limits = _fitted(shares, limits)
    for share in shares:
        share.require_room(limits)
    num_blocks = options.num_blocks or min(share.num_blocks for share in shares)
    plans = tuple(
        WorkerPlan(
            name=share.name,
            groups=share.groups,
            tensors=lay_out_tensors(share.groups, num_blocks, limits.profile, options.order),
        )
        for share in shares
    )
    return CachePlan(
        num_blocks=num_blocks,
        max_model_len=limits.max_model_len,
        concurrency=num_blocks / _request_blocks(groups, limits),
        workers=plans,
    )


def _all_layers(workers: Sequence[WorkerMemory]) -> dict[str, LayerSpec]:
    merged: dict[str, LayerSpec] = {}
    for worker in workers:
        for layer, spec in worker.layers.items():
            if merged.setdefault(layer, spec) != spec:
                raise ConfigError(
                    "workers disagree about a layer",
                    given={"worker": worker.name, "layer": layer, "spec": str(spec)},
                    allowed=str(merged[layer]),
                )
    return merged


def _request_blocks(groups: Sequence[CacheGroup], limits: RequestLimits) -> int:
    """Block ids that one request of the greatest length takes; all groups draw from one pool."""
    return sum(group.request_blocks(limits) for group in groups)


def _fitted(shares: Sequence["_Share"], limits: RequestLimits) -> RequestLimits:
    """Lower the length to the longest that fits on every worker."""
    tightest = min(shares, key=lambda share: share.longest_fit(limits))
    length = tightest.longest_fit(limits)
    if not length:
        one_token = replace(limits, max_model_len=1)
        raise ConfigError(
            "not even a request of one token fits into the KV cache",
            given={"worker": tightest.name, "usable_bytes": tightest.usable_bytes},
            allowed={"usable_bytes": tightest.needed_bytes(one_token)},
        )
    return replace(limits, max_model_len=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One worker's part of the groups, and the bytes it has for requests.

    `reserved_blocks` are held back from requests: the null block (0.17 forgot it).
    """

    name: str
    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    total_bytes: int
    reserved_blocks: int

    @classmethod
    def of(
        cls, worker: WorkerMemory, groups: Sequence[CacheGroup], options: CacheOptions
    ) -> "_Share":
        held = tuple(group.held_by(worker.layers) for group in groups)
        bytes_per_block = max(group.bytes_per_block for group in held)
        if not bytes_per_block:
            raise ConfigError("a worker holds no cached layer", given=worker.name)
        total = worker.available_bytes
        # 0.32 plans a given number of blocks as if it were the memory; 0.17 checks the memory and
        # then takes the number, whatever it is.
        planned = options.limits.profile == "0.32"
        if planned and options.num_blocks is not None:
            total = options.num_blocks * bytes_per_block
        return cls(
            name=worker.name,
            groups=held,
            bytes_per_block=bytes_per_block,
            total_bytes=total,
            reserved_blocks=1 if planned else 0,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that the worker's memory holds."""
        return self.total_bytes // self.bytes_per_block

    @property
    def usable_bytes(self) -> int:
        """Bytes that requests can use."""
        return self.total_bytes - self.reserved_blocks * self.bytes_per_block

    def needed_bytes(self, limits: RequestLimits) -> int:
        """Bytes that one request of the greatest length takes."""
        return self.bytes_per_block * _request_blocks(self.groups, limits)

    def longest_fit(self, limits: RequestLimits) -> int:
        """Return the most tokens, at most `limits.max_model_len`, that fit; 0 if none do."""
        return bisect_right(
            range(1, limits.max_model_len + 1),
            self.usable_bytes,
            key=lambda length: self.needed_bytes(replace(limits, max_model_len=length)),
        )

    def require_room(self, limits: RequestLimits) -> None:
        """Refuse a cache in which one request of the greatest length does not fit.

        Raises:
            ConfigError: `allowed` holds what would do: that many blocks (the null block counted),
                or that length (0: none).
        """
        needed = self.needed_bytes(limits)
        if needed <= self.usable_bytes:
            return
        raise ConfigError(
            "one request of the greatest length does not fit into the KV cache"
            if self.usable_bytes > 0
            else "there is no memory for the KV cache",
            given={
                "worker": self.name,
                "max_model_len": limits.max_model_len,
                "needed_bytes": needed,
                "usable_bytes": self.usable_bytes,
            },
            allowed={
                "num_blocks": needed // self.bytes_per_block + self.reserved_blocks,
                "max_model_len": self.longest_fit(limits),
            },
        )
