"""Whole blocks of a peer where they lie in its memory, mapped here, for whoever copies them itself.

Nothing keeps them there: what was copied counts as far as `num_held` says so afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.group_memory import GroupMemory
from kvferry.worker.residency import Generations, Resident
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk


class SharedBlocks:
    """The first of the blocks that were asked for; they lie at `block_ids` of `memory`.

    Args:
        memory: the peer's, of their group.
        generations: the peer's.
        residents: where they were found.
        terms: those of the fetch; a long copy asks them now and then.
    """

    def __init__(
        self,
        memory: GroupMemory,
        generations: Generations,
        residents: Sequence[Resident],
        terms: FetchTerms,
    ) -> None:
        self.memory = memory
        self.terms = terms
        self.block_ids = [resident.block_id for resident in residents]
        self._generations = generations
        self._residents = residents

    def num_held(self) -> int:
        """Return how many of the first blocks are unchanged since they were found."""
        for index, resident in enumerate(self._residents):
            if not self._generations.still_holds(resident):
                return index
        return len(self._residents)


@runtime_checkable
class SharedReader(Protocol):
    """What can show memory of peers: `TransferClient`, and nothing in the simulator."""

    def read_shared(
        self,
        peer: Peer,
        ask: FetchAsk,
        read: Callable[[SharedBlocks], None],
        session: PullSession,
        terms: FetchTerms,
    ) -> None:
        """As `TransferClient.read_shared`."""
