"""Which blocks an instance has, as far as its events tell."""

from collections import Counter
from typing import NamedTuple

from kvferry.cluster.kv_events_sequence import Lost, Received, Restarted, Update
from kvferry.proto.kv_events import AllBlocksCleared, BlockStored, ExternalHash, KvEvent


class HeldKey(NamedTuple):
    """One content at one place: events of 0.17 name no group."""

    block_hash: ExternalHash
    group_idx: int | None
    medium: str | None


class HeldBlocks:
    """Counts the copies of every block.

    One content may be in several physical blocks. It is told as stored for each and as removed for
    each, and is held until the last is gone.
    """

    def __init__(self) -> None:
        self._copies: Counter[HeldKey] = Counter()
        self._complete = True

    @property
    def complete(self) -> bool:
        """Whether this is exactly what the instance has; False after a loss, until all is told."""
        return self._complete

    def __contains__(self, key: HeldKey) -> bool:
        return key in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def hashes(self) -> set[ExternalHash]:
        """Return the hashes held in any group and medium."""
        return {key.block_hash for key in self._copies}

    def apply(self, update: Update) -> None:
        """Follow one update.

        After a loss the blocks known before are kept: a false one costs a failed fetch, while
        forgetting all of them would cost every hit.
        """
        match update:
            case Received(batch=batch):
                for event in batch.events:
                    self._follow(event)
            case Lost():
                self._complete = False
            case Restarted():
                self._clear()

    def _follow(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._clear()
            return
        for block_hash in event.block_hashes:
            key = HeldKey(block_hash, event.group_idx, event.medium)
            if isinstance(event, BlockStored):
                self._copies[key] += 1
            elif self._copies[key] > 1:
                self._copies[key] -= 1
            else:
                # Unknown ones too: what told of them may have been lost.
                self._copies.pop(key, None)

    def _clear(self) -> None:
        self._copies.clear()
        self._complete = True
