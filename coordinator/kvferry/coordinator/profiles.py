"""The two versions of vLLM whose cache decisions can be reproduced, and where they differ.

One flag per place in which they differ, so that code asks for a behaviour, never for a version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from kvferry.proto.scheme import KeyFormat
from kvferry.proto.specs import ProfileName, require_one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one version does.

    - `key_format`: of extra keys and of hashes over several hash blocks.
    - `frees_unhashed_first`: freed blocks without a hash are reused before all others.
    - `counts_at_lookup`: every lookup is counted, not every admission.
    - `touches_before_loads`: all groups reference their hits before any group takes blocks for
      external tokens; otherwise each group does both before the next one.
    - `prefill_shards_tokens`: prefill ranks multiply what a block id covers, as decode ranks do.
    - `shards_mamba`: the ranks multiply the blocks of mamba groups, too.
    - `hybrid_with_context_parallel`: groups of different kinds may be combined with ranks, where
      every group can be sharded or is a mamba group.
    - `hybrid_of_one_kind`: several groups may all be equal.
    - `drops_once`: what a drafter must recompute is given up once per hit, not once per pass.
    - `caches_reachable_only`: nothing is indexed that no lookup can end at, and the end of a
      prompt may be indexed inside a block.
    - `retires_by_position`: mamba states are given back by how far they were retired already,
      across gaps; otherwise from the last one down to the first gap, less the speculative blocks.
    - `admits_with_reserve`: full-length check, reserve and watermark exist.
    - `builds_sinks`: groups with sink tokens can be built.
    """

    key_format: KeyFormat
    frees_unhashed_first: bool
    counts_at_lookup: bool
    touches_before_loads: bool
    prefill_shards_tokens: bool
    shards_mamba: bool
    hybrid_with_context_parallel: bool
    hybrid_of_one_kind: bool
    drops_once: bool
    caches_reachable_only: bool
    retires_by_position: bool
    admits_with_reserve: bool
    builds_sinks: bool


_V017 = Profile(
    key_format="0.17",
    frees_unhashed_first=False,
    counts_at_lookup=True,
    touches_before_loads=False,
    prefill_shards_tokens=True,
    shards_mamba=True,
    hybrid_with_context_parallel=False,
    hybrid_of_one_kind=False,
    drops_once=False,
    caches_reachable_only=False,
    retires_by_position=False,
    admits_with_reserve=False,
    builds_sinks=True,
)
_V032 = Profile(
    key_format="0.32",
    frees_unhashed_first=True,
    counts_at_lookup=False,
    touches_before_loads=True,
    prefill_shards_tokens=False,
    shards_mamba=False,
    hybrid_with_context_parallel=True,
    hybrid_of_one_kind=True,
    drops_once=True,
    caches_reachable_only=True,
    retires_by_position=True,
    admits_with_reserve=True,
    builds_sinks=False,
)
_PROFILES: Mapping[ProfileName, Profile] = {"0.17": _V017, "0.32": _V032}


def find_profile(name: ProfileName) -> Profile:
    """Return a profile by name.

    Raises:
        ConfigError: no such profile.

    """
    require_one_of("profile", name, get_args(ProfileName))
    return _PROFILES[name]
