"""Which instances hold which hash: one dictionary per size class and group, one bit per instance.

Fed by the events of the pools; answers the longest prefix of every instance in one pass per size
class. Instances of one identity whose blocks cover as many hashes of the chain are a size class:
their blocks are found by the same hashes, the last of each block.

Masks that were made alike are one object, so that the pass compares pointers, not bits: its time
hardly depends on the number of instances.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import islice, repeat
from math import lcm
from operator import and_

from kvferry.coordinator.pool_events import PoolEvent, Removed, Stored
from kvferry.coordinator.prefix_lengths import PrefixLengths, Runs, named
from kvferry.coordinator.prefix_rules import PrefixRule, masks_of_prefixes
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import FIRST_GROUP, BlockHash, GroupedHash, GroupId, InstanceId, pack_group
from kvferry.proto.shared_chain import block_keys


class _Toggle:
    """Turns one bit of masks over; equal results in a row are one object."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self._before = -1
        self._after = -1

    def of(self, mask: int) -> int:
        if mask is not self._before:
            self._before, self._after = mask, mask ^ self.bit
        return self._after


@dataclass(slots=True)
class _SizeClass:
    """Members of one identity whose blocks cover `hashes_per_block` hashes, and what they hold."""

    identity_digest: bytes
    hashes_per_block: int
    everyone: int = 0
    groups: dict[GroupId, dict[BlockHash, int]] = field(default_factory=dict)
    # So many have left whose bits are not purged yet.
    num_purges: int = 0

    def held(self, hashes: Sequence[BlockHash], group_id: GroupId) -> Runs:
        """Return how many blocks each member holds of a group, from the first without a gap.

        Members without the first are in no run.
        """
        masks = self.groups.get(group_id, {})
        runs: Runs = []
        keys = hashes if self.hashes_per_block == 1 else block_keys(hashes, self.hashes_per_block)
        alive = masks.get(keys[0], 0) if keys else 0
        if self.num_purges:
            alive &= self.everyone
        if alive:
            for length, mask in enumerate(map(masks.get, keys)):
                if mask is alive:
                    continue
                held = alive & (mask or 0)
                if held != alive:
                    runs.append((length, alive ^ held))
                    if not held:
                        break
                # The stored object where it will do: the next hashes are likely to have it too.
                alive = mask if mask == held else held
            else:
                runs.append((len(keys), alive))
        return runs

    def usable(self, hashes: Sequence[BlockHash], rules: Sequence[PrefixRule]) -> Runs:
        """Return how many hashes each member can serve, by the rule of every group.

        Only prefixes that end with a block of both sides count.
        """
        covered, unit = self.hashes_per_block, rules[0].unit
        keys = block_keys(hashes, covered)
        by_group = []
        for group_id, rule in enumerate(rules):
            held = self.groups.get(GroupId(group_id), {})
            masks = [held.get(key, 0) for key in keys]
            first_needed = partial(_first_needed_block, rule, covered)
            by_group.append(masks_of_prefixes(masks, first_needed, self.everyone))
        by_length = [reduce(and_, masks) for masks in zip(*by_group, strict=True)]
        step = lcm(covered, unit) // covered
        runs: Runs = []
        found = 0
        for num_blocks in range(len(by_length) // step * step, 0, -step):
            new = by_length[num_blocks - 1] & self.everyone & ~found
            if new:
                runs.append((num_blocks * covered, new))
                found |= new
        runs.reverse()
        return runs


@dataclass(frozen=True, slots=True)
class _Purge:
    """A member that has left, and what of its size class was not yet looked at."""

    left: _SizeClass
    number: int
    todo: Iterator[tuple[dict[BlockHash, int], BlockHash]]


def _first_needed_block(rule: PrefixRule, covered: int, num_blocks: int) -> int:
    """Return the holder's block, of `covered` hashes each, with the first hash that is needed."""
    return rule.first_needed(num_blocks * covered) // covered


class LocationIndex:
    """(identity digest, group, hash) -> the instances that hold it.

    Each member has a small number, its bit in every mask; numbers are reused after a member has
    left, so masks stay as short as the number of live instances. What it held is purged little by
    little, as there may be millions of hashes: until then nobody finds it or gets its number.
    """

    def __init__(self) -> None:
        self._classes: dict[bytes, dict[int, _SizeClass]] = {}
        # A pool may hold one hash in several blocks. Only the copies beyond the first are counted
        # here: they are rare.
        self._extra_copies: dict[tuple[int, GroupId, BlockHash], int] = {}
        self._class_of: dict[InstanceId, _SizeClass] = {}
        self._numbers: dict[InstanceId, int] = {}
        self._members: dict[int, InstanceId] = {}
        self._purges: deque[_Purge] = deque()

    def join(
        self, instance_id: InstanceId, identity_digest: bytes, hashes_per_block: int = 1
    ) -> None:
        """Add an instance that holds nothing yet.

        Its events tell of blocks of `hashes_per_block` hashes, each under the last of them.

        Raises:
            InvariantError: it is a member already.

        """
        if instance_id in self._numbers:
            raise InvariantError("instance is in the location index already", given=instance_id)
        number = 0
        while number in self._members:
            number += 1
        self._numbers[instance_id] = number
        self._members[number] = instance_id
        classes = self._classes.setdefault(identity_digest, {})
        joined = classes.setdefault(hashes_per_block, _SizeClass(identity_digest, hashes_per_block))
        joined.everyone |= 1 << number
        self._class_of[instance_id] = joined

    def leave(self, instance_id: InstanceId) -> None:
        """Let nobody find an instance any more; `purge` forgets what it held.

        Unknown instances are no error.
        """
        if instance_id not in self._numbers:
            return
        left = self._class_of.pop(instance_id)
        number = self._numbers.pop(instance_id)
        self._forget_copies(number)
        left.everyone ^= 1 << number
        left.num_purges += 1
        todo = ((masks, held) for masks in list(left.groups.values()) for held in list(masks))
        self._purges.append(_Purge(left, number, todo))
        if not left.everyone:
            classes = self._classes[left.identity_digest]
            del classes[left.hashes_per_block]
            if not classes:
                del self._classes[left.identity_digest]
            left.groups.clear()

    def purge(self, num_hashes: int) -> None:
        """Forget what members held that have left, looking at about so many hashes."""
        while self._purges and num_hashes > 0:
            purge = self._purges[0]
            part = list(islice(purge.todo, num_hashes))
            num_hashes -= len(part)
            if not part or not purge.left.everyone:
                self._purges.popleft()
                purge.left.num_purges -= 1
                del self._members[purge.number]
                continue
            toggle = _Toggle(1 << purge.number)
            for masks, block_hash in part:
                mask = masks.get(block_hash, 0)
                if mask == toggle.bit:
                    del masks[block_hash]
                elif mask & toggle.bit:
                    masks[block_hash] = toggle.of(mask)

    def apply(self, instance_id: InstanceId, events: Iterable[PoolEvent]) -> None:
        """Follow what an instance's pool did.

        Raises:
            InvariantError: a hash is removed that the instance does not hold.

        """
        groups = self._class_of[instance_id].groups
        number = self._numbers[instance_id]
        toggle = _Toggle(1 << number)
        for event in events:
            if isinstance(event, Stored):
                self._store(groups.setdefault(event.group_id, {}), event, number, toggle)
            elif isinstance(event, Removed):
                self._remove(groups.get(event.group_id, {}), event, number, toggle)
            else:
                self._clear(instance_id)

    def _store(
        self, masks: dict[BlockHash, int], event: Stored, number: int, toggle: "_Toggle"
    ) -> None:
        hashes, num_before = event.hashes, len(masks)
        if masks.keys().isdisjoint(hashes):
            # Content that nobody has yet, which most is.
            masks.update(zip(hashes, repeat(toggle.bit)))
            if len(masks) - num_before < len(hashes):
                for block_hash, count in Counter(hashes).items():
                    self._add_copies(number, event.group_id, block_hash, count - 1)
            return
        for block_hash in hashes:
            mask = masks.get(block_hash, 0)
            if mask & toggle.bit:
                self._add_copies(number, event.group_id, block_hash, 1)
            else:
                masks[block_hash] = toggle.of(mask)

    def _remove(
        self, masks: dict[BlockHash, int], event: Removed, number: int, toggle: "_Toggle"
    ) -> None:
        hashes, bit = event.hashes, toggle.bit
        if self._extra_copies:
            hashes = tuple(h for h in hashes if not self._drop_copy(number, event.group_id, h))
        found = list(map(masks.pop, hashes, repeat(0)))
        if found.count(bit) == len(found):
            # Content that nobody else has, which most is.
            return
        for block_hash, mask in zip(hashes, found, strict=True):
            if not mask & bit:
                raise InvariantError(
                    "a hash was removed that the instance does not hold",
                    given={
                        "instance": self._members[number],
                        "group": event.group_id,
                        "hash": block_hash.hex(),
                    },
                )
            if mask != bit:
                masks[block_hash] = toggle.of(mask)

    def longest_prefixes(
        self, identity_digest: bytes, hashes: Sequence[BlockHash], group_id: GroupId
    ) -> PrefixLengths:
        """Return how many of `hashes`, from the first without a gap, each instance holds.

        They are those of the whole blocks that it has within them.
        """
        runs: Runs = []
        for covered, one in self._classes.get(identity_digest, {}).items():
            held = one.held(hashes, group_id)
            runs += held if covered == 1 else [(length * covered, m) for length, m in held]
        return self._prefixes(identity_digest, runs)

    def longest_usable(
        self,
        identity_digest: bytes,
        hashes: Sequence[BlockHash],
        rules: Sequence[PrefixRule],
        limit: int | None = None,
    ) -> PrefixLengths:
        """Return how many of `hashes` each instance can serve, by the rule of every group.

        The rules are those of whoever goes on after the prefix, all with one unit: lengths are
        multiples of it, and at most `limit` (None: all hashes). Where each block is needed the
        prefix may end inside a block of the holder, which is found by a hash after its end then.
        """
        limit = len(hashes) if limit is None else limit
        if len(rules) == 1 and rules[0].needs_all:
            held = self.longest_prefixes(identity_digest, hashes, FIRST_GROUP)
            return held.cut(limit, rules[0].unit)
        runs: Runs = []
        for one in self._classes.get(identity_digest, {}).values():
            runs += one.usable(hashes[:limit], rules)
        return self._prefixes(identity_digest, runs)

    def _prefixes(self, identity_digest: bytes, runs: Runs) -> PrefixLengths:
        if len(self._classes.get(identity_digest, ())) > 1:
            runs.sort()
        return PrefixLengths(runs, self._members)

    def copies_of(self, instance_id: InstanceId) -> dict[GroupedHash, int]:
        """Return every key of an instance with the number of its copies (for checks)."""
        number = self._numbers[instance_id]
        return {
            pack_group(block_hash, group_id): 1
            + self._extra_copies.get((number, group_id, block_hash), 0)
            for group_id, masks in self._class_of[instance_id].groups.items()
            for block_hash, mask in masks.items()
            if mask >> number & 1
        }

    def holders(
        self, like: InstanceId, block_hash: BlockHash, group_ids: Iterable[GroupId]
    ) -> Iterator[InstanceId]:
        """Yield who of a member's identity and size class has a hash in all groups.

        Nobody is like an instance that is no member.
        """
        one = self._class_of.get(like)
        if one is None:
            return iter(())
        masks = (one.groups.get(group_id, {}).get(block_hash, 0) for group_id in group_ids)
        return named(reduce(and_, masks, one.everyone), self._members)

    def num_only_at(self, instance_id: InstanceId) -> int:
        """Count the blocks that no other instance of its identity and size class holds."""
        one, bit = self._class_of[instance_id], 1 << self._numbers[instance_id]
        held = (mask for masks in one.groups.values() for mask in masks.values())
        return sum(mask & one.everyone == bit for mask in held)

    def num_keys(self) -> int:
        """Return the number of (identity, group, hash) entries."""
        return sum(
            len(masks)
            for classes in self._classes.values()
            for one in classes.values()
            for masks in one.groups.values()
        )

    def members(self) -> set[InstanceId]:
        """Return the instances in the index."""
        return set(self._numbers)

    def _add_copies(
        self, number: int, group_id: GroupId, block_hash: BlockHash, count: int
    ) -> None:
        if count:
            copy = (number, group_id, block_hash)
            self._extra_copies[copy] = self._extra_copies.get(copy, 0) + count

    def _drop_copy(self, number: int, group_id: GroupId, block_hash: BlockHash) -> bool:
        """Forget a copy beyond the first, and tell whether there was one."""
        copy = (number, group_id, block_hash)
        extra = self._extra_copies.pop(copy, 0)
        if extra > 1:
            self._extra_copies[copy] = extra - 1
        return extra > 0

    def _clear(self, instance_id: InstanceId) -> None:
        number = self._numbers[instance_id]
        for masks in self._class_of[instance_id].groups.values():
            for block_hash in [held for held, mask in masks.items() if mask >> number & 1]:
                if masks[block_hash] == 1 << number:
                    del masks[block_hash]
                else:
                    masks[block_hash] &= ~(1 << number)
        self._forget_copies(number)

    def _forget_copies(self, number: int) -> None:
        for extra in [extra for extra in self._extra_copies if extra[0] == number]:
            del self._extra_copies[extra]
