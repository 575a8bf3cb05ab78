"""What a connector asks the service about prefixes, and the answer."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvferry.cluster.connectors.orders import HeldPrefix
from kvferry.proto.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What is held of a prefix anywhere, the longest first.

    `num_stored`: how many of the first hash blocks the engine's own store holds.
    """

    holders: tuple[HeldPrefix, ...] = ()
    num_stored: int = 0

    @property
    def num_blocks(self) -> int:
        """How many of the first hash blocks one holder has."""
        return self.holders[0].num_blocks if self.holders else 0


NOTHING = Prefix()


class Prefixes(Protocol):
    """The service, as far as the scheduler half needs it. Nothing but `reset` waits for it."""

    @property
    def is_away(self) -> bool:
        """True for a moment after the service did not answer."""

    @property
    def num_failed(self) -> int:
        """Questions without an answer so far."""

    def look_up(self, hashes: Sequence[BlockHash]) -> "Future[Prefix]":
        """Ask who holds the longest prefix; a failure is an answer too: `NOTHING`."""

    def keep_when_stored(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Lease a prefix as soon as the engine's own store has all of it, if it soon has."""

    def wait_answered(self, timeout_s: float) -> None:
        """Wait until some answer comes."""

    def reset(self) -> bool:
        """Make everything of the identity unfindable; return whether that is done."""

    def close(self) -> None:
        """Ask no more."""
