"""Which blocks of a group must be held for a prefix to be usable: all, a window, the last state."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.proto.identity import GroupSpec, Identity


class PrefixRule(NamedTuple):
    """The rule of one group, in blocks of `block_tokens` tokens."""

    spec: GroupSpec
    block_tokens: int

    @property
    def needs_all(self) -> bool:
        """Whether a prefix needs each of its blocks."""
        return self.spec.kind == "full"

    def first_needed(self, num_blocks: int) -> int:
        """Return the first block needed to go on after `num_blocks` blocks; those before are not.

        It never falls as `num_blocks` grows.
        """
        return self.spec.first_needed_block(num_blocks, self.block_tokens)


def rules_of(identity: Identity, block_tokens: int) -> tuple[PrefixRule, ...]:
    """Return the rules of an identity's groups, in group order."""
    return tuple(PrefixRule(group, block_tokens) for group in identity.groups)


def masks_of_prefixes(masks: Sequence[int], rule: PrefixRule, everyone: int) -> Iterator[int]:
    """Yield for each prefix of 1, 2, ... blocks the members for which it is usable in a group.

    `masks[i]` are the members that hold block i, one bit each; `everyone` has all bits. Each mask
    is looked at about twice, however wide the window is: the needed blocks are the end of a part
    of which every tail has been joined already, and what came after it.
    """
    tails: list[int] = []
    tails_start, after = 0, everyone
    for end, mask in enumerate(masks, 1):
        first = rule.first_needed(end)
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
