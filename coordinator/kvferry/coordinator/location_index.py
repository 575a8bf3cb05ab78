"""Which instances hold which hash: one dictionary per identity, one bit per instance.

Fed by the events of the pools; answers the longest prefix of every instance in one pass.
"""

from collections.abc import Iterable, Sequence

from kvferry.coordinator.pool_events import PoolEvent, Removed, Stored
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import GroupedHash, InstanceId


class LocationIndex:
    """(identity digest, key) -> the instances that hold it.

    Each member has a small number, its bit in every mask; numbers are reused after a member has
    left, so masks stay as short as the number of live instances.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, dict[GroupedHash, int]] = {}
        # A pool may hold one hash in several blocks. Only the copies beyond the first are counted
        # here: they are rare.
        self._extra_copies: dict[tuple[int, GroupedHash], int] = {}
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
            InvariantError: a key is removed that the instance does not hold.

        """
        number = self._numbers[instance_id]
        masks = self._masks[self._digests[instance_id]]
        for event in events:
            if isinstance(event, Stored):
                for key in event.keys:
                    self._add(masks, number, key)
            elif isinstance(event, Removed):
                self._remove(masks, number, event.key)
            else:
                self._clear(instance_id)

    def longest_prefixes(
        self, identity_digest: bytes, keys: Sequence[GroupedHash]
    ) -> dict[InstanceId, int]:
        """Return how many of `keys`, from the first without a gap, each instance holds.

        Instances that do not hold the first key are left out.
        """
        masks = self._masks.get(identity_digest)
        if not masks or not keys:
            return {}
        lengths: dict[InstanceId, int] = {}
        alive = masks.get(keys[0], 0)
        for position, key in enumerate(keys):
            held = alive & masks.get(key, 0)
            if held != alive:
                self._note(lengths, alive & ~held, position)
                alive = held
            if not alive:
                return lengths
        self._note(lengths, alive, len(keys))
        return lengths

    def copies_of(self, instance_id: InstanceId) -> dict[GroupedHash, int]:
        """Return every key of an instance with the number of its copies (for checks)."""
        number = self._numbers[instance_id]
        masks = self._masks[self._digests[instance_id]]
        return {
            key: 1 + self._extra_copies.get((number, key), 0)
            for key, mask in masks.items()
            if mask >> number & 1
        }

    def num_keys(self) -> int:
        """Return the number of (identity, key) entries."""
        return sum(len(masks) for masks in self._masks.values())

    def members(self) -> set[InstanceId]:
        """Return the instances in the index."""
        return set(self._numbers)

    def _note(self, lengths: dict[InstanceId, int], mask: int, length: int) -> None:
        while mask:
            lowest = mask & -mask
            lengths[self._members[lowest.bit_length() - 1]] = length
            mask ^= lowest

    def _add(self, masks: dict[GroupedHash, int], number: int, key: GroupedHash) -> None:
        mask = masks.get(key, 0)
        if mask >> number & 1:
            self._extra_copies[number, key] = self._extra_copies.get((number, key), 0) + 1
        else:
            masks[key] = mask | 1 << number

    def _remove(self, masks: dict[GroupedHash, int], number: int, key: GroupedHash) -> None:
        extra = self._extra_copies.pop((number, key), 0)
        if extra > 1:
            self._extra_copies[number, key] = extra - 1
        if extra:
            return
        mask = masks.get(key, 0)
        if not mask >> number & 1:
            raise InvariantError(
                "a key was removed that the instance does not hold",
                given={"instance": self._members[number], "key": key.hex()},
            )
        if mask == 1 << number:
            del masks[key]
        else:
            masks[key] = mask & ~(1 << number)

    def _clear(self, instance_id: InstanceId) -> None:
        number = self._numbers[instance_id]
        masks = self._masks[self._digests[instance_id]]
        for key in [key for key, mask in masks.items() if mask >> number & 1]:
            if masks[key] == 1 << number:
                del masks[key]
            else:
                masks[key] &= ~(1 << number)
        for extra in [extra for extra in self._extra_copies if extra[0] == number]:
            del self._extra_copies[extra]
