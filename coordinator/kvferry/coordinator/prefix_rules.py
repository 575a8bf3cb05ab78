"""Which part of a prefix must be held for it to be usable: all of it, a window, the last state.

Prefixes are counted in hashes of the service's chain. Who goes on after a prefix and who holds it
may have blocks of different sizes: the one needs its blocks, the other holds its own, and what
relates them is the positions they cover.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvferry.proto.identity import GroupSpec, Identity


class PrefixRule(NamedTuple):
    """The rule of one group for whoever goes on after a prefix, in blocks of `unit` hashes.

    A hash covers `hash_block_tokens` tokens.
    """

    spec: GroupSpec
    hash_block_tokens: int
    unit: int

    @property
    def needs_all(self) -> bool:
        """Whether a prefix needs each of its blocks."""
        return self.spec.kind == "full"

    def first_needed(self, num_hashes: int) -> int:
        """Return the first hash needed to go on after the whole blocks in `num_hashes` hashes.

        It is the first one of a block; those before it are not needed. It never falls as
        `num_hashes` grows.
        """
        num_blocks = num_hashes // self.unit
        if not num_blocks:
            return 0
        block_tokens = self.unit * self.hash_block_tokens
        return self.spec.first_needed_block(num_blocks, block_tokens) * self.unit


def rules_of(identity: Identity, hash_block_tokens: int, unit: int) -> tuple[PrefixRule, ...]:
    """Return the rules of an identity's groups, in group order, for blocks of `unit` hashes."""
    return tuple(PrefixRule(group, hash_block_tokens, unit) for group in identity.groups)


def masks_of_prefixes(
    masks: Sequence[int], first_needed: Callable[[int], int], everyone: int
) -> Iterator[int]:
    """Yield for each prefix of 1, 2, ... blocks the members for which it is usable in a group.

    `masks[i]` are the members that hold block i, one bit each; `everyone` has all bits.
    `first_needed(n)` is the first block that a prefix of n blocks needs; it never falls. Each mask
    is looked at about twice, however wide the window is: the needed blocks are the end of a part
    of which every tail has been joined already, and what came after it.
    """
    tails: list[int] = []
    tails_start, after = 0, everyone
    for end, mask in enumerate(masks, 1):
        first = first_needed(end)
        after &= mask
        if first >= tails_start + len(tails):
            tails, tails_start, after = _tails(masks[first:end], everyone), first, everyone
        held = tails[first - tails_start] if first < tails_start + len(tails) else everyone
        yield held & after


def _tails(masks: Sequence[int], everyone: int) -> list[int]:
    """Return for each position the members that hold it and all after it."""
    joined = [everyone] * len(masks)
    held = everyone
    for i in range(len(masks) - 1, -1, -1):
        held &= masks[i]
        joined[i] = held
    return joined
