"""How much of a prefix each instance holds, as the location index finds it: by bits, one each."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from kvferry.proto.ids import InstanceId

Runs = list[tuple[int, int]]
"""Lengths of prefixes, ascending, each with the members whose longest prefix it is, as bits."""


class PrefixLengths(Mapping[InstanceId, int]):
    """How many hashes of the chain, from the first on, each instance can serve; absent if none.

    Decoded when it is read: whoever wants the best few does not pay for a thousand. Valid until the
    index changes.
    """

    def __init__(self, runs: Runs, members: Mapping[int, InstanceId]) -> None:
        """Keep runs, whose masks are disjoint, and the names of the bits."""
        self._runs = runs
        self._members = members

    def longest_first(self) -> Iterator[tuple[InstanceId, int]]:
        """Yield instances with their lengths in hashes, longest first; of one length any first."""
        for length, mask in reversed(self._runs):
            for instance_id in named(mask, self._members):
                yield instance_id, length

    def cut(self, limit: int, unit: int) -> "PrefixLengths":
        """Return the same with no length above `limit`, each cut to a multiple of `unit`."""
        cut = [(min(length, limit) // unit * unit, mask) for length, mask in self._runs]
        return PrefixLengths([run for run in cut if run[0]], self._members)

    @cached_property
    def _lengths(self) -> dict[InstanceId, int]:
        return dict(self.longest_first())

    def __getitem__(self, instance_id: InstanceId) -> int:
        return self._lengths[instance_id]

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)


def named(mask: int, members: Mapping[int, InstanceId]) -> Iterator[InstanceId]:
    """Yield the members that bits stand for."""
    left = mask
    while left:
        lowest = left & -left
        yield members[lowest.bit_length() - 1]
        left ^= lowest
