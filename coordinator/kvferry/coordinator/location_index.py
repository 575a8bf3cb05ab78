"""Which instances hold which hash: one dictionary per identity and group, one bit per instance.

Fed by the events of the pools; answers the longest prefix of every instance in one pass.

Masks that were made alike are one object, so that the pass compares pointers, not bits: its time
hardly depends on the number of instances.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import repeat
from operator import and_

from kvferry.coordinator.pool_events import PoolEvent, Removed, Stored
from kvferry.coordinator.prefix_rules import PrefixRule, masks_of_prefixes
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import FIRST_GROUP, BlockHash, GroupedHash, GroupId, InstanceId, pack_group


class PrefixLengths(Mapping[InstanceId, int]):
    """How many hashes, from the first without a gap, each instance holds; absent if none.

    Decoded when it is read: whoever wants the best few does not pay for a thousand. Valid until the
    index changes.
    """

    def __init__(self, runs: Sequence[tuple[int, int]], members: Mapping[int, InstanceId]) -> None:
        """Keep `(length, mask)` pairs, lengths ascending and masks disjoint, and names of bits."""
        self._runs = runs
        self._members = members

    def longest_first(self) -> Iterator[tuple[InstanceId, int]]:
        """Yield instances with their lengths in hashes, longest first; of one length any first."""
        for length, mask in reversed(self._runs):
            left = mask
            while left:
                lowest = left & -left
                yield self._members[lowest.bit_length() - 1], length
                left ^= lowest

    @cached_property
    def _lengths(self) -> dict[InstanceId, int]:
        return dict(self.longest_first())

    def __getitem__(self, instance_id: InstanceId) -> int:
        return self._lengths[instance_id]

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)


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


class LocationIndex:
    """(identity digest, group, hash) -> the instances that hold it.

    Each member has a small number, its bit in every mask; numbers are reused after a member has
    left, so masks stay as short as the number of live instances.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, dict[GroupId, dict[BlockHash, int]]] = {}
        # A pool may hold one hash in several blocks. Only the copies beyond the first are counted
        # here: they are rare.
        self._extra_copies: dict[tuple[int, GroupId, BlockHash], int] = {}
        self._digests: dict[InstanceId, bytes] = {}
        self._numbers: dict[InstanceId, int] = {}
        self._members: dict[int, InstanceId] = {}

    def join(self, instance_id: InstanceId, identity_digest: bytes) -> None:
        """Add an instance that holds nothing yet.

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
        self._digests[instance_id] = identity_digest
        self._masks.setdefault(identity_digest, {})

    def leave(self, instance_id: InstanceId) -> None:
        """Forget an instance and everything it held. Unknown instances are no error."""
        if instance_id not in self._numbers:
            return
        self._clear(instance_id)
        digest = self._digests.pop(instance_id)
        del self._members[self._numbers.pop(instance_id)]
        if digest not in self._digests.values():
            del self._masks[digest]

    def apply(self, instance_id: InstanceId, events: Iterable[PoolEvent]) -> None:
        """Follow what an instance's pool did.

        Raises:
            InvariantError: a hash is removed that the instance does not hold.

        """
        groups = self._masks[self._digests[instance_id]]
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
        """Return how many of `hashes`, from the first without a gap, each instance holds."""
        masks = self._masks.get(identity_digest, {}).get(group_id, {})
        runs: list[tuple[int, int]] = []
        alive = masks.get(hashes[0], 0) if hashes else 0
        if alive:
            for length, mask in enumerate(map(masks.get, hashes)):
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
                runs.append((len(hashes), alive))
        return PrefixLengths(runs, self._members)

    def longest_usable(
        self, identity_digest: bytes, hashes: Sequence[BlockHash], rules: Sequence[PrefixRule]
    ) -> PrefixLengths:
        """Return how many of `hashes` each instance can serve, by the rule of every group."""
        if len(rules) == 1 and rules[0].needs_all:
            return self.longest_prefixes(identity_digest, hashes, FIRST_GROUP)
        groups = self._masks.get(identity_digest, {})
        everyone = 0
        for number, instance_id in self._members.items():
            if self._digests[instance_id] == identity_digest:
                everyone |= 1 << number
        usable = []
        for group_id, rule in enumerate(rules):
            held = groups.get(GroupId(group_id), {})
            masks = [held.get(block_hash, 0) for block_hash in hashes]
            usable.append(masks_of_prefixes(masks, rule, everyone))
        by_length = [reduce(and_, masks) for masks in zip(*usable, strict=True)]
        runs: list[tuple[int, int]] = []
        found = 0
        for length in range(len(by_length), 0, -1):
            new = by_length[length - 1] & ~found
            if new:
                runs.append((length, new))
                found |= new
        runs.reverse()
        return PrefixLengths(runs, self._members)

    def copies_of(self, instance_id: InstanceId) -> dict[GroupedHash, int]:
        """Return every key of an instance with the number of its copies (for checks)."""
        number = self._numbers[instance_id]
        return {
            pack_group(block_hash, group_id): 1
            + self._extra_copies.get((number, group_id, block_hash), 0)
            for group_id, masks in self._masks[self._digests[instance_id]].items()
            for block_hash, mask in masks.items()
            if mask >> number & 1
        }

    def num_keys(self) -> int:
        """Return the number of (identity, group, hash) entries."""
        return sum(len(masks) for groups in self._masks.values() for masks in groups.values())

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
        for masks in self._masks[self._digests[instance_id]].values():
            for block_hash in [held for held, mask in masks.items() if mask >> number & 1]:
                if masks[block_hash] == 1 << number:
                    del masks[block_hash]
                else:
                    masks[block_hash] &= ~(1 << number)
        for extra in [extra for extra in self._extra_copies if extra[0] == number]:
            del self._extra_copies[extra]
