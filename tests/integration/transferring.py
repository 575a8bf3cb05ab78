"""Pulling from a worker in another process, and what must be true of the blocks afterwards."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.integration.transfer_host import SIZES
from tests.integration.transfer_peer import PeerService, content_of, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.ids import FIRST_GROUP, BlockId, pack_group
from kvferry.worker.block_io import gather
from kvferry.worker.frames import Place
from kvferry.worker.paths import Path
from kvferry.worker.pull import BlockRun, PullOutcome
from kvferry.worker.service import WorkerService


@contextmanager
def here(**settings: Any) -> Iterator[PeerService]:
    worker = new_worker(**{"incarnation": 50, **SIZES, **settings})
    try:
        yield worker
    finally:
        worker.stop()


@contextmanager
def pair(paths: Sequence[Path]) -> Iterator[tuple[PeerService, PeerService, str]]:
    """A source that holds all its blocks, one that pulls, and the source's address."""
    with here(incarnation=1, paths=paths) as source, here(incarnation=2, paths=paths) as taker:
        fill(source)
        yield source, taker, source.serve()


def pull(
    worker: WorkerService,
    address: str,
    *,
    indexes: range | None = None,
    incarnation: int = 1,
    timeout_s: float = 20.0,
    cancel: threading.Event | None = None,
) -> PullOutcome:
    """Pull the hashes of `indexes` into the blocks from the last one downwards."""
    indexes = indexes or range(worker.memory.num_blocks - 1)
    return pull_blocks(
        worker,
        address,
        [run_of(worker, indexes)],
        incarnation=incarnation,
        timeout_s=timeout_s,
        cancel=cancel,
    )


def run_of(worker: WorkerService, indexes: range) -> BlockRun:
    return BlockRun(
        group_id=FIRST_GROUP,
        hashes=[hash_of(index) for index in indexes],
        block_ids=[destination(worker, position) for position in range(len(indexes))],
    )


def destination(worker: WorkerService, position: int) -> BlockId:
    return BlockId(worker.memory.num_blocks - 1 - position)


def assert_exactly_in_place(worker: PeerService, num_blocks: int) -> None:
    """The first blocks hold their bytes and are resident; no byte of the others was written."""
    (memory,) = worker.memory.groups
    for position in range(memory.num_blocks - 1):
        place = Place(destination(worker, position), 0, memory.geometry.num_layers)
        found = gather(memory, [place])
        resident = worker.residency.find(pack_group(hash_of(position), FIRST_GROUP))
        if position < num_blocks:
            assert found == content_of(position, memory.geometry.block_bytes), position
            assert resident is not None
        else:
            # Over a bulk socket bytes land in blocks before they are verified; nobody sees them.
            if worker.takes_grpc_only:
                assert found == bytes(memory.geometry.block_bytes), position
            assert resident is None
