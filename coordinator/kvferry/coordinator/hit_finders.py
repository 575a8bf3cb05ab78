"""The longest prefix that all groups of a cache agree on: without cache, one group, several."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import GroupManager
from kvferry.proto.ids import BlockHash, BlockId, GroupId
from kvferry.proto.specs import LayerSpec, MambaSpec, WholeLengthSpec

GroupBlocks = tuple[Sequence[BlockId], ...]
"""One list of block ids per group, in group order."""


class Hit(NamedTuple):
    """A prefix hit: its blocks per group (null where one is skipped) and its tokens.

    `shared_tokens`: how far some group holds the prefix beyond the hit, 0 if none does.
    """

    blocks: GroupBlocks
    num_tokens: int
    shared_tokens: int = 0


class HitFinder(Protocol):
    """Finds hits; touches nothing."""

    def find(self, hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """Return the longest hit of at most `max_tokens` tokens.

        Raises:
            BadInputError: a group cannot be looked up in this configuration.

        """


def make_hit_finder(config: CacheConfig, managers: Sequence[GroupManager]) -> HitFinder:
    """Return the finder for a configuration's groups."""
    if not config.enable_caching:
        return NoHits(len(managers))
    if len(managers) == 1:
        return OneGroupHits(managers[0])
    return HybridHits(config, managers)


class NoHits:
    """Nothing is cached."""

    def __init__(self, num_groups: int) -> None:
        self._hit = Hit(tuple(() for _ in range(num_groups)), 0)

    def find(self, hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """Return no hit."""
        return self._hit


class OneGroupHits:
    """One group: its own longest hit."""

    def __init__(self, manager: GroupManager) -> None:
        self._manager = manager
        self._group_ids = (manager.group_id,)

    def find(self, hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """Return the group's longest hit; see `HitFinder`."""
        manager = self._manager
        blocks, num_tokens = manager.find_longest_hit(
            hashes, max_tokens, self._group_ids, drop=manager.drops
        )
        return Hit(tuple(blocks), num_tokens)


class _Kind(NamedTuple):
    """Groups of equal specs, looked up jointly through the manager of the first."""

    manager: GroupManager
    group_ids: tuple[GroupId, ...]
    is_full: bool
    is_state: bool


class HybridHits:
    """Groups of several kinds: the candidate length is shortened until every kind accepts it.

    Full attention is asked first and once: its hits are prefixes, so they can be cut afterwards.
    """

    def __init__(self, config: CacheConfig, managers: Sequence[GroupManager]) -> None:
        members: dict[LayerSpec, list[GroupId]] = {}
        for manager in managers:
            members.setdefault(config.groups[manager.group_id], []).append(manager.group_id)
        kinds = [
            _Kind(
                managers[ids[0]],
                tuple(ids),
                is_full=isinstance(spec, WholeLengthSpec),
                is_state=isinstance(spec, MambaSpec),
            )
            for spec, ids in members.items()
        ]
        self._kinds = sorted(kinds, key=lambda kind: not kind.is_full)
        self._num_groups = len(managers)
        self._hash_tokens = config.hash_block_tokens
        self._partial_hits = config.partial_hits
        self._drops_once = config.rules.drops_once
        # Two kinds, the first of them full: what the second accepts, the first does.
        self._one_pass = len(kinds) == 2 and self._kinds[0].is_full

    def find(self, hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """Return the longest hit of all groups; see `HitFinder`."""
        search = _Search(self._num_groups)
        length = max_tokens
        while True:
            candidate = length
            for number, kind in enumerate(self._kinds):
                candidate = self._shorten(search, number, kind, hashes, candidate)
            if candidate >= length:
                break
            length = candidate
            if self._one_pass:
                break
        self._cut_full(search, length)
        blocks = tuple(found if found is not None else [] for found in search.blocks)
        shared = search.longest if self._drops_once and search.longest > length else 0
        return Hit(blocks, length, shared)

    def _shorten(
        self,
        search: "_Search",
        number: int,
        kind: _Kind,
        hashes: Sequence[BlockHash],
        candidate: int,
    ) -> int:
        """Return how much of a candidate length a kind accepts, remembering its blocks."""
        first = kind.group_ids[0]
        if kind.is_full and search.blocks[first] is not None:
            if self._drops_once:
                return min(candidate, search.lengths[first])
            return candidate // kind.manager.block_tokens * kind.manager.block_tokens
        drop = kind.manager.drops and number not in search.dropped
        reach = candidate
        if drop and self._drops_once and not kind.is_state:
            # What will be dropped is looked up beyond the candidate, so the drop lands on it.
            reach = min(candidate + self._drop_tokens(kind), len(hashes) * self._hash_tokens)
        found, length = kind.manager.find_longest_hit(hashes, reach, kind.group_ids, drop=drop)
        if self._drops_once:
            if drop:
                search.dropped.add(number)
            elif length < candidate:
                search.dropped.clear()
        for group_id, blocks in zip(kind.group_ids, found, strict=True):
            search.blocks[group_id] = blocks
            search.lengths[group_id] = length
        search.longest = max(search.longest, length)
        return length

    def _drop_tokens(self, kind: _Kind) -> int:
        if self._partial_hits and kind.is_full:
            return self._hash_tokens
        return kind.manager.block_tokens

    def _cut_full(self, search: "_Search", length: int) -> None:
        """Cut the hits of full attention; without `drops_once`, only those of its first kind."""
        for kind in self._kinds if self._drops_once else self._kinds[:1]:
            if kind.is_full:
                num_blocks = -(-length // kind.manager.block_tokens)
                for group_id in kind.group_ids:
                    blocks = search.blocks[group_id]
                    if blocks is not None:
                        del blocks[num_blocks:]


class _Search:
    """What one lookup over several kinds has found so far.

    `dropped`: kinds whose hit at the current length has had its end given up already.
    """

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[list[BlockId] | None] = [None] * num_groups
        self.lengths = [0] * num_groups
        self.longest = 0
        self.dropped: set[int] = set()
