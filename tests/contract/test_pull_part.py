"""Transfers of a plan between workers of two layouts, over gRPC: the selected bytes, or no more."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from tests.tampering import Messages, TamperingService
from tests.unit.worker.reshard_by_loops import (
    bytes_of,
    fill,
    identity_of,
    kv_memories,
    random_table,
)

from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, Incarnation, LeaseId
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import plan_reshard
from kvferry.worker import chunks
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frames import Header
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.part_pull import pull_part
from kvferry.worker.pull import PartOutcome, PartRun
from kvferry.worker.selection import Selection, StridedRuns
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_wire import make_fetch_ask

SHAPE = KvShape(num_layers=4, num_kv_heads=4, head_size=8, dtype="float32")
NUM_TOKENS = 200
TOKEN_BYTES = 2 * 2 * 32
"""K and V of two heads of a token, in one layer."""


class Move:
    """A sequence that the ranks of one layout hold, and those of another pull by plan."""

    def __init__(self, source: Layout, destination: Layout, first_block: int) -> None:
        random = Random(7)
        self.source, self.destination = source, destination
        self.client = TransferClient(paths=())
        self.first_block = first_block
        start = first_block * source.virtual_block_tokens
        self.positions = range(start, NUM_TOKENS)
        self.tables = [random_table(random, one, NUM_TOKENS) for one in (source, destination)]
        size = (SHAPE.num_layers, 2, NUM_TOKENS, SHAPE.num_kv_heads, SHAPE.head_bytes)
        self.dense = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        self.hashes = [
            BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(len(self.tables[0]))
        ]
        self.plan = plan_reshard(source, destination, SHAPE, start=start, end=NUM_TOKENS)
        memories = kv_memories(source, SHAPE, len(self.tables[0]) + 3)
        fill(memories, source, SHAPE, self.tables[0], dense=self.dense, positions=range(NUM_TOKENS))
        self.senders = {rank: self._sender(memory) for rank, memory in memories.items()}
        self.addresses = {rank: sender.serve() for rank, sender in self.senders.items()}
        self.takers = {
            rank: WorkerService(incarnation=Incarnation(2), memory=memory)
            for rank, memory in kv_memories(destination, SHAPE, len(self.tables[1]) + 3).items()
        }

    def _sender(self, memory: KvMemory) -> TamperingService:
        sender = TamperingService(incarnation=Incarnation(1), memory=memory, paths=())
        block_ids = [BlockId(block_id) for block_id in self.tables[0].tolist()]
        sender.written(FIRST_GROUP, zip(self.hashes, block_ids, strict=True))
        return sender

    def run_of(self, index: int) -> PartRun:
        return PartRun(
            group_id=FIRST_GROUP,
            hashes=self.hashes[self.first_block :],
            transfer=self.plan.transfers[index],
            table=self.tables[1],
            skipped_source_tokens=self.first_block * self.source.block_tokens,
        )

    def pull(self, index: int, cancel: threading.Event | None = None) -> PartOutcome:
        transfer = self.plan.transfers[index]
        return pull_part(
            self.client,
            Peer(
                address=self.addresses[transfer.src_rank],
                identity=identity_of(SHAPE),
                layout=self.source,
                rank=transfer.src_rank,
                incarnation=Incarnation(1),
            ),
            self.run_of(index),
            memory=self.takers[transfer.dst_rank].memory,
            terms=FetchTerms(
                lease_id=LeaseId("lease-1"),
                end_s=time.monotonic() + 20.0,
                cancel=cancel or threading.Event(),
            ),
        )

    def assert_in_place(self, positions: range) -> None:
        """Exactly these positions are at every destination rank."""
        wanted = kv_memories(self.destination, SHAPE, len(self.tables[1]) + 3)
        fill(
            wanted,
            self.destination,
            SHAPE,
            self.tables[1],
            dense=self.dense,
            positions=positions,
        )
        for rank, memory in wanted.items():
            assert bytes_of(self.takers[rank].memory) == bytes_of(memory), f"rank {rank}"


@contextmanager
def moving(source: Layout, destination: Layout, *, first_block: int = 0) -> Iterator[Move]:
    move = Move(source, destination, first_block)
    try:
        yield move
    finally:
        move.client.close()
        for service in (*move.senders.values(), *move.takers.values()):
            service.stop()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of ten tokens with two heads, so that a transfer has several."""
    monkeypatch.setattr(chunks, "CHUNK_PAGE_BYTES", 10 * TOKEN_BYTES)


@pytest.mark.parametrize("first_block", [0, 2])
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (grid(block_tokens=8, pcp=2, stage_layers=(4,)),
         grid(block_tokens=16, dcp=2, interleave=4, stage_layers=(4,))),
        (vllm(block_tokens=4, tp=4, dcp=2, stage_layers=(4,)),
         grid(block_tokens=6, tp=2, pp=2, dcp=3, interleave=2, stage_layers=(1, 3))),
        (grid(block_tokens=8, tp=2, dcp=2, stage_layers=(4,), memory="LBSHN"),
         grid(block_tokens=6, pp=2, dcp=3, stage_layers=(1, 3), memory="BLSNH")),
    ],
)  # fmt: skip
def test_all_transfers_of_a_plan_fill_every_destination_rank(
    source: Layout, destination: Layout, first_block: int
) -> None:
    with moving(source, destination, first_block=first_block) as move:
        for index, transfer in enumerate(move.plan.transfers):
            outcome = move.pull(index)
            assert outcome == PartOutcome(
                num_in_place=transfer.num_tokens, num_bytes=transfer.num_bytes
            )
        move.assert_in_place(move.positions)
        assert all(one.residency.num_blocks() == 0 for one in move.takers.values())


# One rank to another: positions are local tokens on both, in chunks of ten.
ONE = grid(block_tokens=4, tp=2, stage_layers=(4,))
OTHER = grid(block_tokens=8, tp=2, stage_layers=(4,))


def test_of_a_prefix_that_is_held_the_whole_chunks_arrive() -> None:
    with moving(ONE, OTHER) as move:
        for index in range(2):
            move.senders[index].reused([BlockId(int(move.tables[0][9]))])
            outcome = move.pull(index)
            # Nine blocks of four tokens are three chunks and a part of one.
            assert (outcome.num_in_place, outcome.error_type) == (30, "NotFoundError")
        move.assert_in_place(range(30))


def test_a_block_handed_out_anew_while_it_is_read_ends_the_transfer_before_its_chunk() -> None:
    lost = 7

    def reuse(sender: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        block_id = BlockId(int(move.tables[0][lost]))
        sender.reused([block_id])
        sender.memory.layers[0][:, block_id] = 9.0
        yield from messages

    with moving(ONE, OTHER) as move:
        for index in range(2):
            move.senders[index].tamper = reuse
            outcome = move.pull(index)
            assert (outcome.num_in_place, outcome.error_type) == (20, "NotFoundError")
            assert outcome.error is not None
            assert f"hash_index={lost}," in outcome.error
        move.assert_in_place(range(20))


def test_a_corrupt_frame_is_refused_and_counted() -> None:
    def corrupt(_: WorkerService, messages: Messages) -> Messages:
        for message in messages:
            if isinstance(message, Header):
                yield message
            else:
                yield replace(message, payload=bytes(len(message.payload)))

    with moving(ONE, OTHER) as move:
        for index in range(2):
            move.senders[index].tamper = corrupt
            outcome = move.pull(index)
            assert (outcome.num_in_place, outcome.num_bytes) == (0, 0)
            assert (outcome.num_checksum_failures, outcome.error_type) == (1, "TransferError")
        move.assert_in_place(range(0))


def test_a_cancelled_pull_calls_nobody() -> None:
    cancel = threading.Event()
    cancel.set()
    with moving(ONE, OTHER) as move:
        outcome = move.pull(0, cancel)
        assert (outcome.num_in_place, outcome.error_type) == (0, "Cancelled")
        assert move.senders[0].stats().of("served").num_started == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": range(3, 5)}, "no such layers here"),
        ({"layers": range(2, 2)}, "no such layers here"),
        ({"heads": range(1, 3)}, "no such heads here"),
        ({"runs": (StridedRuns(first=0, run_tokens=201),)}, "beyond the asked blocks"),
    ],
)
def test_a_selection_of_what_is_not_here_is_refused_at_once(
    changes: dict[str, object], message: str
) -> None:
    with moving(ONE, OTHER) as move:
        asked = Selection(
            layers=range(4), heads=range(2), runs=(StridedRuns(first=0, run_tokens=200),)
        )
        ask = make_fetch_ask(identity_of(SHAPE), move.hashes, selection=asked, layout=ONE)
        header = next(move.senders[0].open_fetch(ask))
        assert isinstance(header, Header)
        assert header.num_found == 20
        wrong = replace(asked, **changes)  # type: ignore[arg-type]
        with pytest.raises(BadInputError, match=message):
            next(move.senders[0].open_fetch(replace(ask, selection=wrong)))


def test_destination_blocks_that_cannot_be_written_are_refused_before_anybody_is_called() -> None:
    with moving(ONE, OTHER) as move:
        move.tables[1][3] = 0
        with pytest.raises(BadInputError, match="no such blocks here; given: 0 to"):
            move.pull(0)
        assert move.senders[0].stats().of("served").num_started == 0
