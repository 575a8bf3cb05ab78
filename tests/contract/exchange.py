"""Two instances of any layouts in this process: the ranks of one pull what those of the other have.

Bytes are those of a dense sequence, put at the source where docs/layouts.md says, and looked for at
the destination the same way. What a destination has not been given is `BEFORE`, everywhere.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from random import Random

import numpy as np
from tests.tampering import TamperingService
from tests.unit.worker.reshard_by_loops import (
    Dense,
    blocks_of,
    fill,
    kv_memories,
    random_table,
    storages_of,
)

from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import (
    FIRST_GROUP,
    BlockHash,
    BlockId,
    GroupedHash,
    Incarnation,
    InstanceId,
    LeaseId,
    pack_group,
)
from kvferry.proto.layout import Layout
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import Plan, plan_reshard
from kvferry.proto.shared_chain import block_keys
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import GroupLoad, group_load
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.paths import Path
from kvferry.worker.pull import PullOutcome
from kvferry.worker.service import WorkerService

SHAPE = KvShape(num_layers=4, num_kv_heads=4, head_size=2, dtype="float32")
BEFORE = 0xEE


class Exchange:
    """A source that holds a sequence, and a destination that wants `num_blocks` of its blocks.

    The source holds as many whole blocks as have any of those tokens. Layouts must name their
    stages (`parts_of_ranks`).
    """

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        *,
        num_blocks: int,
        first_block: int = 0,
        shape: KvShape = SHAPE,
        theirs: KvShape | None = None,
        paths: Sequence[Path] = (),
    ) -> None:
        random = Random(7)
        self.source, self.destination, self.shape = source, destination, shape
        self.first_block, self.num_blocks, self.paths = first_block, num_blocks, paths
        covered = source.virtual_block_tokens
        num_tokens = -(-(first_block + num_blocks) * destination.virtual_block_tokens // covered)
        num_tokens *= covered
        self.hash_tokens = math.gcd(covered, destination.virtual_block_tokens)
        scheme = make_scheme(hash_block_tokens=self.hash_tokens)
        self.chain = hash_tokens(scheme, list(range(num_tokens)))
        size = (shape.num_layers, 2, num_tokens, shape.num_kv_heads, shape.head_bytes)
        self.dense: Dense = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)

        self.source_table = random_table(random, source, num_tokens)
        memories = kv_memories(source, theirs or shape, len(self.source_table) + 3)
        if theirs is None:
            fill(
                memories,
                source,
                shape,
                self.source_table,
                dense=self.dense,
                positions=range(num_tokens),
            )
        self.senders = [self._sender(memories[rank]) for rank in range(source.num_ranks)]
        self.addresses = [sender.serve() for sender in self.senders]

        end = (first_block + num_blocks) * destination.virtual_block_tokens
        self.table = random_table(random, destination, end)
        taking = self._memories()
        self.takers = [
            WorkerService(incarnation=Incarnation(2), memory=taking[rank], paths=paths)
            for rank in range(destination.num_ranks)
        ]

    def _sender(self, memory: KvMemory) -> TamperingService:
        sender = TamperingService(incarnation=Incarnation(1), memory=memory, paths=self.paths)
        covered = self.source.virtual_block_tokens // self.hash_tokens
        block_ids = [BlockId(block_id) for block_id in self.source_table.tolist()]
        sender.written(FIRST_GROUP, zip(block_keys(self.chain, covered), block_ids, strict=True))
        return sender

    def _memories(self) -> dict[int, KvMemory]:
        memories = kv_memories(self.destination, self.shape, len(self.table) + 3)
        for memory in memories.values():
            for storage in storages_of(memory):
                storage[:] = BEFORE
        return memories

    @property
    def plan(self) -> Plan:
        """What has to move for all asked blocks."""
        covered = self.destination.virtual_block_tokens
        return plan_reshard(
            self.source,
            self.destination,
            self.shape,
            start=self.first_block * covered,
            end=(self.first_block + self.num_blocks) * covered,
        )

    def load(self, first: int, end: int) -> GroupLoad:
        """The load of the sequence's blocks [first, end)."""
        return group_load(
            self.chain,
            FIRST_GROUP,
            [BlockId(block_id) for block_id in self.table[first:end].tolist()],
            first_block=first,
            block_tokens=self.destination.virtual_block_tokens,
            source_block_tokens=self.source.virtual_block_tokens,
            hash_block_tokens=self.hash_tokens,
        )

    def pull(
        self,
        rank: int,
        loads: Sequence[GroupLoad] | None = None,
        *,
        incarnation: int = 1,
        timeout_s: float = 20.0,
        cancel: threading.Event | None = None,
    ) -> PullOutcome:
        """Let one destination rank pull its part of the loads, all asked blocks by default."""
        asked = self.load(self.first_block, self.first_block + self.num_blocks)
        return self.takers[rank].pull(
            source=Source(
                instance_id=InstanceId("source"),
                incarnation=Incarnation(incarnation),
                layout=self.source,
                rank_addresses=tuple(self.addresses),
            ),
            lease_id=LeaseId("lease-1"),
            loads=[asked] if loads is None else loads,
            timeout_s=timeout_s,
            cancel=cancel or threading.Event(),
        )

    def pull_all(self) -> list[PullOutcome]:
        """Let all destination ranks pull at the same time."""
        with ThreadPoolExecutor(len(self.takers)) as threads:
            return list(threads.map(self.pull, range(len(self.takers))))

    def lose(self, rank: int, block: int) -> None:
        """Let a source rank hand out a block of the sequence anew, and overwrite it."""
        block_id = BlockId(int(self.source_table[block]))
        self.senders[rank].reused([block_id])
        for layer in self.senders[rank].memory.layers:
            layer[:, block_id] = 9.0

    def assert_holds(self, rank: int, num_blocks: int, *, only: bool = True) -> None:
        """The first so many asked blocks are whole and resident at a rank, and nothing else is.

        With `only`, other asked blocks are as they were before; in any case blocks that were not
        asked for are.
        """
        first = self.first_block
        covered = self.destination.virtual_block_tokens
        wanted = self._memories()[rank]
        fill(
            {rank: wanted},
            self.destination,
            self.shape,
            self.table,
            dense=self.dense,
            positions=range(first * covered, (first + num_blocks) * covered),
        )
        asked = self.table[first : first + self.num_blocks].tolist()
        compared = set(range(wanted.num_blocks))
        if not only:
            compared -= set(asked[num_blocks:])
        found = self.takers[rank].memory
        for layer, side in product(found.groups[0].layers, (0, 1)):
            here, right = (blocks_of(memory, layer, side) for memory in (found, wanted))
            for block_id in compared:
                same = np.array_equal(here[block_id], right[block_id])
                assert same, f"rank {rank}, layer {layer}, side {side}, block {block_id}"
        self._assert_resident(rank, num_blocks)

    def _assert_resident(self, rank: int, num_blocks: int) -> None:
        covered = self.destination.virtual_block_tokens // self.hash_tokens
        keys = block_keys(self.chain, covered)[self.first_block :]
        residency = self.takers[rank].residency
        asked = self.table[self.first_block : self.first_block + num_blocks].tolist()
        assert residency.num_blocks() == num_blocks
        for key, block_id in zip(keys, asked, strict=False):
            found = residency.find(_grouped(key))
            assert found is not None
            assert found.block_id == block_id

    def stop(self) -> None:
        """Stop all ranks."""
        for service in (*self.takers, *self.senders):
            service.stop()


def _grouped(key: BlockHash) -> GroupedHash:
    return pack_group(key, FIRST_GROUP)


@contextmanager
def exchanging(
    source: Layout,
    destination: Layout,
    *,
    num_blocks: int,
    first_block: int = 0,
    shape: KvShape = SHAPE,
    theirs: KvShape | None = None,
    paths: Sequence[Path] = (),
) -> Iterator[Exchange]:
    """Yield an `Exchange`, and stop it.

    Args:
        source: its layout.
        destination: its layout.
        num_blocks: blocks of the destination that are asked for.
        first_block: which of the sequence the first of them is.
        shape: what both cache of a token.
        theirs: what the source caches instead, if it is of another identity.
        paths: those that both sides may take besides gRPC.
    """
    exchange = Exchange(
        source,
        destination,
        num_blocks=num_blocks,
        first_block=first_block,
        shape=shape,
        theirs=theirs,
        paths=paths,
    )
    try:
        yield exchange
    finally:
        exchange.stop()
