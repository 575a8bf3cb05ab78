"""Which rank of an instance holds which tokens, layers and KV heads of a sequence.

A layout is the sizes of an instance's axes. Every rank has a place on them; from it follow

- its stage: the layers it holds (pp),
- its head shard: the KV heads it holds,
- its token shard: the positions it holds. With N token shards and interleave I, position p belongs
  to shard `p // I % N`, where it is local token `p // (N * I) * I + p % I`; local token t lies in
  the rank's block `t // block_tokens` at `t % block_tokens`.

Ranks with the same three hold the same: they are replicas. docs/layouts.md has pictures.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from kvferry.proto.errors import ConfigError
from kvferry.proto.memory_order import DEFAULT_ORDER, require_order
from kvferry.proto.specs import CURRENT_PROFILE, ProfileName, require_integer, require_one_of

LayoutKind = Literal["grid", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What decides which part of a sequence a rank holds: an index on each axis, from 0."""

    stage: int
    head_shard: int
    token_shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an instance's ranks share layers (pp), KV heads (tp) and tokens (dcp, pcp).

    `kind` "grid": every axis has ranks of its own, pp * pcp * dcp * tp of them, the last fastest.
    `kind` "vllm": there are pp * pcp * tp ranks, and dcp takes some of the others; `profile` says
    of which vLLM. In 0.17 tokens are dealt over dcp * pcp ranks, in 0.32 over dcp only.

    `block_tokens` are the tokens of one block on one rank, `interleave` how many consecutive ones
    a rank gets at a time. `stage_layers` are the numbers of layers of the stages; empty for an even
    split. `memory` names the order of a rank's memory (`kvferry.proto.memory_order`).

    Raises:
        ConfigError: a size that is no integer of at least 1, an interleave that does not divide the
            block, or axes that do not go together; naming the rule and both values.
    """

    block_tokens: int
    kind: LayoutKind = "grid"
    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    profile: ProfileName = CURRENT_PROFILE
    stage_layers: tuple[int, ...] = ()
    memory: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, get_args(LayoutKind))
        require_one_of("profile", self.profile, get_args(ProfileName))
        for name in ("block_tokens", "tp", "pp", "pcp", "dcp", "interleave"):
            require_integer(name, getattr(self, name), at_least=1)
        for layers in self.stage_layers:
            require_integer("stage_layers", layers, at_least=1)
        require_order(self.memory)
        if self.block_tokens % self.interleave:
            raise ConfigError(
                "interleave must divide block_tokens",
                given={"interleave": self.interleave},
                allowed={"block_tokens": self.block_tokens},
            )
        if self.stage_layers and len(self.stage_layers) != self.pp:
            raise ConfigError(
                "stage_layers must name the layers of every stage",
                given={"stage_layers": len(self.stage_layers)},
                allowed={"pp": self.pp},
            )
        if self.kind == "vllm":
            self._require_room_for_dcp()
        elif self.profile != CURRENT_PROFILE:
            raise ConfigError(
                "only a layout of kind vllm has a profile", given=self.profile, allowed="kind=vllm"
            )

    def _require_room_for_dcp(self) -> None:
        """Refuse a dcp for which vLLM finds no ranks."""
        if self.profile == "0.32" and self.pcp > 1:
            if self.dcp not in (1, self.pcp, self.tp * self.pcp):
                raise ConfigError(
                    "with pcp, dcp must be 1, pcp or tp * pcp",
                    given={"dcp": self.dcp},
                    allowed={"tp": self.tp, "pcp": self.pcp},
                )
        elif self.tp % self.dcp:
            raise ConfigError(
                "dcp must divide tp", given={"dcp": self.dcp}, allowed={"tp": self.tp}
            )

    @property
    def _dcp_spans_pcp(self) -> bool:
        """Whether dcp takes the ranks of pcp (0.32): of pcp alone, or of all tp and pcp."""
        return self.kind == "vllm" and self.profile == "0.32" and self.pcp > 1 and self.dcp > 1

    @property
    def num_ranks(self) -> int:
        """Number of worker actors that together hold the cache."""
        ranks = self.pp * self.pcp * self.tp
        return ranks * self.dcp if self.kind == "grid" else ranks

    @property
    def token_shards(self) -> int:
        """Number of ranks that the tokens of one sequence are dealt over."""
        if self.kind == "vllm" and self.profile == "0.32":
            return self.dcp
        return self.dcp * self.pcp

    @property
    def head_shards(self) -> int:
        """Number of parts that the KV heads of a layer are cut into (some may be replicas)."""
        if self.kind == "grid":
            return self.tp
        if self._dcp_spans_pcp:
            return self.tp * self.pcp // self.dcp
        return self.tp // self.dcp

    @property
    def virtual_block_tokens(self) -> int:
        """Tokens that one block id covers over all ranks."""
        return self.block_tokens * self.token_shards

    def place(self, rank: int) -> RankPlace:
        """Return the place of a rank.

        Raises:
            ConfigError: no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError("no such rank", given=rank, allowed=f"0 to {self.num_ranks - 1}")
        above, tp_rank = divmod(rank, self.tp)
        if self.kind == "grid":
            # The ranks of pcp and dcp lie side by side, in the order of their shards.
            stage, shard = divmod(above, self.token_shards)
            return RankPlace(stage=stage, head_shard=tp_rank, token_shard=shard)
        stage, pcp_rank = divmod(above, self.pcp)
        shards_in_tp = self.dcp // self.pcp if self._dcp_spans_pcp else self.dcp
        head_shard, shard = divmod(tp_rank, shards_in_tp)
        if self.token_shards > shards_in_tp:
            shard += pcp_rank * shards_in_tp
        return RankPlace(stage=stage, head_shard=head_shard, token_shard=shard)

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage, of a model with `num_layers`.

        An even split; what is left over goes to the stages before the last, the later first, as
        in vLLM.

        Raises:
            ConfigError: more stages than layers, or `stage_layers` of another model.
        """
        sizes = list(self.stage_layers)
        if not sizes:
            each, left = divmod(num_layers, self.pp)
            first = self.pp - 1 - left
            sizes = [each + (first <= stage < self.pp - 1) for stage in range(self.pp)]
        if sum(sizes) != num_layers or min(sizes) < 1:
            raise ConfigError(
                "the stages must share the model's layers, each at least one",
                given={"pp": self.pp, "stage_layers": list(self.stage_layers)},
                allowed={"num_layers": num_layers},
            )
        ends = [sum(sizes[: stage + 1]) for stage in range(self.pp)]
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def heads(self, num_kv_heads: int) -> tuple[range, ...]:
        """Return the KV heads of each head shard, of a model with `num_kv_heads`.

        With more shards than heads each head has several shards, one after the other.

        Raises:
            ConfigError: neither number divides the other.
        """
        shards = self.head_shards
        if max(num_kv_heads, shards) % min(num_kv_heads, shards):
            raise ConfigError(
                "the head shards must divide the KV heads, or the reverse",
                given={"head_shards": shards, "tp": self.tp, "dcp": self.dcp},
                allowed={"num_kv_heads": num_kv_heads},
            )
        each = math.ceil(num_kv_heads / shards)
        replicas = math.ceil(shards / num_kv_heads)
        firsts = [shard // replicas * each for shard in range(shards)]
        return tuple(range(first, first + each) for first in firsts)


grid = partial(Layout, kind="grid")
"""Makes a layout of pp * pcp * dcp * tp ranks; tokens are dealt over dcp * pcp of them."""

vllm = partial(Layout, kind="vllm")
"""Makes a layout of pp * pcp * tp ranks, as vLLM of its profile has them.

What vLLM refuses for a model is in `vllm_rules`.
"""
