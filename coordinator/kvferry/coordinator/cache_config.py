"""Everything a cache manager is built from, and what follows from it alone."""

from dataclasses import dataclass
from math import lcm

from kvferry.coordinator.profiles import Profile, find_profile
from kvferry.coordinator.refusals import config_refused
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import GroupId
from kvferry.proto.scheme import KeyFormat
from kvferry.proto.specs import (
    CURRENT_PROFILE,
    ChunkedLocalSpec,
    LayerSpec,
    MambaSpec,
    ProfileName,
    RequestLimits,
    SinkSpec,
    SlidingWindowSpec,
    WholeLengthSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """One pool and its groups. Counts are in tokens unless named otherwise.

    - `num_blocks`: size of the pool, the null block included.
    - `groups`: one spec per cache group, in the order of group ids; blocks are those of one rank.
    - `hash_block_tokens`: what one hash of a request covers.
    - `shared_chain`: the hashes are a chain that caches of other block sizes share, so one may be
      smaller than a block in every profile, and a block is found by the last hash it covers.
    - `max_model_len`: cap of the slots of a request.
    - `profile`: whose decisions are reproduced.
    - `use_eagle`: a drafter needs the end of every hit recomputed; it concerns `eagle_groups`, and
      all groups when that is empty.
    - `dcp`, `pcp`: decode and prefill ranks over which the tokens of a request are dealt.
    - `watermark`: fraction of the pool that an admission leaves free beside running requests.
    - `max_in_flight_tokens`: most tokens of one request scheduled and not settled; bounds what a
      group that gives blocks back holds at once (None: `max_model_len`).
    - `retention_interval`: groups with sparse hits keep one resumable position per interval, 0:
      only the last one of a prompt, None: every one.
    - `record_events`: tell what enters and leaves the index.
    """

    num_blocks: int
    groups: tuple[LayerSpec, ...]
    hash_block_tokens: int
    max_model_len: int
    shared_chain: bool = False
    profile: ProfileName = CURRENT_PROFILE
    enable_caching: bool = True
    use_eagle: bool = False
    eagle_groups: tuple[GroupId, ...] = ()
    dcp: int = 1
    pcp: int = 1
    watermark: float = 0.0
    max_in_flight_tokens: int | None = None
    retention_interval: int | None = None
    record_events: bool = True

    def __post_init__(self) -> None:
        """Refuse what can never work.

        Raises:
            ConfigError: a number out of range, or parts that contradict each other; `given` holds
                the reason's code and the numbers.

        """
        for name in ("num_blocks", "hash_block_tokens", "max_model_len", "dcp", "pcp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} must be a positive integer", given=repr(value), allowed=">= 1"
                )
        if self.watermark < 0:
            raise ConfigError("watermark", given=self.watermark, allowed="a fraction >= 0")
        unknown = [group for group in self.eagle_groups if not 0 <= group < len(self.groups)]
        if unknown:
            raise ConfigError("eagle_groups", given=unknown, allowed=f"0 to {len(self.groups) - 1}")
        _check_kinds(self)
        _check_retention(self)
        if self.enable_caching and len(self.groups) == 1:
            _check_one_group(self)
        elif self.enable_caching:
            _check_hybrid(self)

    @property
    def rules(self) -> Profile:
        """The behaviours of the profile."""
        return find_profile(self.profile)

    @property
    def view_format(self) -> KeyFormat:
        """How hashes are seen at blocks of several: as the profile does, or by the last of each."""
        return "0.32" if self.shared_chain else self.rules.key_format

    def block_tokens_of(self, group_id: GroupId) -> int:
        """Return what one block id of a group covers over all ranks."""
        spec = self.groups[group_id]
        return spec.block_tokens * self.shards_of(spec)

    def shards_of(self, spec: LayerSpec) -> int:
        """Return over how many ranks the tokens of a group are dealt."""
        if not self.deals(spec):
            return 1
        return self.dcp * self.pcp if self.rules.prefill_shards_tokens else self.dcp

    def deals(self, spec: LayerSpec) -> bool:
        """Tell whether more ranks mean more tokens per block id in a group."""
        return self.rules.shards_mamba or not isinstance(spec, MambaSpec)

    @property
    def scheduler_block_tokens(self) -> int:
        """Least common multiple of all groups' blocks: where every group has a block end."""
        return lcm(*(self.block_tokens_of(GroupId(i)) for i in range(len(self.groups))))

    @property
    def partial_hits(self) -> bool:
        """Whether a hit may end inside a block, at any hash.

        That takes a mamba group that keeps the states at which computing stopped, with blocks
        larger than a hash, and that every other group can be looked up that finely.
        """
        if not (self.rules.caches_reachable_only and self.enable_caching and len(self.groups) > 1):
            return False
        finest = self.hash_block_tokens + (self.dcp == 1)
        return any(
            isinstance(spec, MambaSpec) and spec.mode == "align" and spec.block_tokens >= finest
            for spec in self.groups
        ) and all(
            isinstance(spec, WholeLengthSpec | MambaSpec)
            or self.block_tokens_of(GroupId(i)) == self.hash_block_tokens
            for i, spec in enumerate(self.groups)
        )

    @property
    def alignment_tokens(self) -> int:
        """Every hit is a multiple of so many tokens."""
        return self.hash_block_tokens if self.partial_hits else self.scheduler_block_tokens

    @property
    def drops_any(self) -> bool:
        """Whether any group has the end of its hits recomputed."""
        return self.use_eagle or bool(self.eagle_groups)

    def drops_in(self, group_id: GroupId) -> bool:
        """Tell whether a group has the end of its hits recomputed.

        Groups of one spec are looked up jointly, so one of them decides for all.
        """
        if not self.rules.drops_once:
            return self.use_eagle
        if not self.eagle_groups:
            return self.use_eagle
        spec = self.groups[group_id]
        return any(self.groups[eagle] == spec for eagle in self.eagle_groups)

    def max_held_blocks(self, group_id: GroupId) -> int | None:
        """Return how many blocks of a group one request holds at most, None: all of them."""
        spec = self.groups[group_id]
        if not isinstance(spec, SlidingWindowSpec | ChunkedLocalSpec):
            return None
        in_flight = self.max_in_flight_tokens
        # Ranks are left out: such groups refuse them, but only when they are looked up.
        limits = RequestLimits(
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_model_len if in_flight is None else in_flight,
        )
        return spec.request_pages(limits)


def _check_kinds(config: CacheConfig) -> None:
    for number, spec in enumerate(config.groups):
        if not isinstance(spec, SinkSpec):
            continue
        if not config.rules.builds_sinks:
            raise config_refused(
                "kind_not_constructible",
                "this profile has no groups with sink tokens",
                allowed="another kind, or profile 0.17",
                kind=spec.kind,
                profile=config.profile,
            )
        block_tokens = config.block_tokens_of(GroupId(number))
        if spec.sink_tokens % block_tokens:
            raise config_refused(
                "sink_not_multiple_of_block",
                "sink tokens must fill whole blocks",
                allowed=f"a positive multiple of {block_tokens}",
                sink_tokens=spec.sink_tokens,
            )


def _check_retention(config: CacheConfig) -> None:
    interval = config.retention_interval
    if interval is None:
        return
    if not config.rules.caches_reachable_only:
        raise ConfigError("retention_interval", given=interval, allowed="None in profile 0.17")
    if not any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in config.groups):
        if interval:
            raise config_refused(
                "retention_without_sparse_kind",
                "no group has hits that could be kept sparsely",
                allowed="0 or None without sliding-window or mamba groups",
                retention_interval=interval,
            )
    elif interval < 0 or interval % config.scheduler_block_tokens:
        raise config_refused(
            "retention_not_multiple",
            "retention_interval must be a multiple of all groups' blocks",
            allowed=f"a multiple of {config.scheduler_block_tokens}",
            retention_interval=interval,
        )


def _check_one_group(config: CacheConfig) -> None:
    block_tokens = config.block_tokens_of(GroupId(0))
    if config.shared_chain:
        _require_whole_hashes(config, [block_tokens])
    elif block_tokens != config.hash_block_tokens:
        raise config_refused(
            "hash_unit_must_equal_block",
            "with one group a hash covers what a block id covers",
            allowed=block_tokens,
            hash_block_tokens=config.hash_block_tokens,
        )


def _require_whole_hashes(config: CacheConfig, blocks: list[int]) -> None:
    if any(block % config.hash_block_tokens for block in blocks):
        raise config_refused(
            "block_not_multiple_of_hash_unit",
            "every group's block must be a multiple of a hash",
            allowed=f"multiples of {config.hash_block_tokens}",
            block_tokens=blocks,
        )


def _check_hybrid(config: CacheConfig) -> None:
    blocks = [config.block_tokens_of(GroupId(i)) for i in range(len(config.groups))]
    if not config.rules.hybrid_with_context_parallel:
        # Checked on one rank's blocks, before ranks are considered at all.
        blocks = [spec.block_tokens for spec in config.groups]
    _require_whole_hashes(config, blocks)
    if (config.dcp > 1 or config.pcp > 1) and not _ranks_fit_groups(config):
        raise config_refused(
            "context_parallel_with_hybrid",
            "groups of these kinds cannot be combined with context parallel ranks",
            allowed="dcp = pcp = 1",
            kinds=[spec.kind for spec in config.groups],
            dcp=config.dcp,
            pcp=config.pcp,
        )
    if len(set(config.groups)) < 2 and not config.rules.hybrid_of_one_kind:
        raise config_refused(
            "hybrid_needs_two_distinct_kinds",
            "several groups must not all be equal in this profile",
            allowed="one group, or groups of different specs",
            groups=len(config.groups),
        )


def _ranks_fit_groups(config: CacheConfig) -> bool:
    if not config.rules.hybrid_with_context_parallel:
        return False
    if config.pcp > 1:
        return all(isinstance(spec, WholeLengthSpec) for spec in config.groups)
    return all(isinstance(spec, WholeLengthSpec | MambaSpec) for spec in config.groups)
