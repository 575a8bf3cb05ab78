"""A store at a coordinator, which is told to take what the ranks of an exchange hold."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from tests.builders import make_info
from tests.contract.exchange import SHAPE, Exchange, exchanging
from tests.unit.worker.reshard_by_loops import identity_of

from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import Identity
from kvferry.proto.ids import FIRST_GROUP, BlockHash, Epoch, GroupId, Incarnation, InstanceId
from kvferry.proto.layout import Layout, grid
from kvferry.proto.messages import (
    Command,
    Describe,
    Description,
    EndReservation,
    InstanceStatus,
    Locate,
    Located,
    RegisterInstance,
    Reply,
    ResetIdentity,
    expect,
)
from kvferry.proto.placement import KvShape
from kvferry.proto.step_messages import Source
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.paths import Path
from kvferry.worker.transfer_client import TransferClient

BLOCK_TOKENS = 16
"""Of a hash block, so of every (virtual) block here."""
STAGE = (SHAPE.num_layers,)
STORE = grid(block_tokens=BLOCK_TOKENS, stage_layers=STAGE)


class TakingStore:
    """The exchange's only taker as a store; invariants are checked at every command.

    `chain` are the hashes of the blocks that the source holds, from `first_block` on. `has_ended`
    is set when a reservation is given back.
    """

    def __init__(self, exchange: Exchange) -> None:
        (self.worker,) = exchange.takers
        self.exchange = exchange
        self.chain = exchange.chain[exchange.first_block :]
        self.has_ended = threading.Event()
        self.client = TransferClient()
        self.address = self.worker.serve()
        self.coordinator = CoordinatorActor(
            scheme=make_scheme(hash_block_tokens=BLOCK_TOKENS),
            registry=ProcessRegistry(),
            # The store has no heartbeat.
            suspect_after_s=600.0,
            dead_after_s=1200.0,
            check_invariants=True,
        )
        self.coordinator.start()
        info = make_info(
            "store-0",
            role="store",
            identity=self.identity,
            block_tokens=BLOCK_TOKENS,
            num_blocks=self.worker.memory.num_blocks,
            rank_addresses=(self.address,),
            max_model_len=0,
        )
        self.coordinator.call(RegisterInstance(call_id="register", info=info))
        self.worker.reserver = CoordinatorReserver(
            self._call,
            instance_id=info.instance_id,
            incarnation=info.incarnation,
            epoch=Epoch(1),
        )

    @property
    def identity(self) -> Identity:
        return identity_of(self.exchange.shape)

    @property
    def source(self) -> Source:
        return Source(
            instance_id=InstanceId("engine-0"),
            incarnation=Incarnation(1),
            layout=self.exchange.source,
            rank_addresses=tuple(self.exchange.addresses),
        )

    def take(
        self,
        first: int = 0,
        end: int | None = None,
        *,
        identity: Identity | None = None,
        group_id: int = FIRST_GROUP,
        source: Source | None = None,
        timeout_s: float = 20.0,
    ) -> int:
        """Have the store take blocks `[first, end)` of those from the exchange's first on."""
        return self.client.take(
            self.address,
            identity=identity or self.identity,
            group_id=GroupId(group_id),
            hashes=self.chain[first:end],
            first_block=self.exchange.first_block + first,
            source=source or self.source,
            timeout_s=timeout_s,
        )

    def assert_holds(self, block_ids: Sequence[int], *, only: bool = True) -> None:
        """The first hashes are in these blocks, whole, and the only ones that are findable.

        With `only`, all other blocks are as they were before.
        """
        first, wanted = self.exchange.first_block, self.exchange.num_blocks
        others = [one for one in range(1, wanted + 1) if one not in block_ids]
        table = [0] * first + [*block_ids, *others][:wanted]
        self.exchange.table = np.array(table, dtype=np.int64)
        self.exchange.assert_holds(0, len(block_ids), only=only)
        assert self.num_findable(self.chain) == len(block_ids)
        assert self.status().num_cached_blocks == len(block_ids)
        self.assert_nothing_is_kept()

    def assert_nothing_is_kept(self) -> None:
        status = self.status()
        assert (status.held.reservations, status.num_used_blocks) == (0, 0)

    def num_findable(self, hashes: Sequence[BlockHash]) -> int:
        command = Locate(identity_digest=self.identity.digest(), hashes=tuple(hashes))
        (holder,) = expect(self.coordinator.call(command), Located).holders
        return holder.num_hashes

    def reset(self) -> None:
        digest = self.identity.digest()
        self.coordinator.call(ResetIdentity(call_id="reset", identity_digest=digest))

    def status(self) -> InstanceStatus:
        (status,) = expect(self.coordinator.call(Describe()), Description).instances
        return status

    def stop(self) -> None:
        self.client.close()
        self.coordinator.stop()

    def _call(self, command: Command) -> Reply:
        reply = self.coordinator.call(command)
        if isinstance(command, EndReservation):
            self.has_ended.set()
        return reply


@contextmanager
def taking_store(
    source: Layout,
    *,
    num_blocks: int = 5,
    first_block: int = 0,
    theirs: KvShape | None = None,
    paths: Sequence[Path] = (),
) -> Iterator[TakingStore]:
    """Yield a store that can take `num_blocks` blocks of an instance of the layout `source`."""
    with exchanging(
        source, STORE, num_blocks=num_blocks, first_block=first_block, theirs=theirs, paths=paths
    ) as exchange:
        store = TakingStore(exchange)
        try:
            yield store
        finally:
            store.stop()
