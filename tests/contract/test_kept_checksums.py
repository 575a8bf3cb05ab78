"""A sender hashes what a block holds once: sends cost less, and later damage of memory is seen."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.integration.transfer_host import SIZES
from tests.integration.transfer_peer import content_of, fill, hash_of, new_worker
from tests.integration.transferring import pull

from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation
from kvferry.worker import bulk_server
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.frames import Place
from kvferry.worker.paths import Path
from kvferry.worker.service import WorkerService

DAMAGED = 2
"""Index of the hash whose block's memory changes, though nobody said so."""


@pytest.fixture(params=[(), ("bulk",)], ids=["grpc", "bulk"])
def source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WorkerService]:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    worker = make_worker(1, request.param)
    fill(worker)
    yield worker
    worker.stop()


@pytest.fixture
def takers(source: WorkerService) -> Iterator[list[WorkerService]]:
    with ExitStack() as running:
        workers = [make_worker(2 + index, source._paths) for index in range(2)]
        for worker in workers:
            running.callback(worker.stop)
        yield workers


def make_worker(incarnation: int, paths: tuple[Path, ...]) -> WorkerService:
    memory = new_worker(incarnation, **SIZES).memory
    return WorkerService(incarnation=Incarnation(incarnation), memory=memory, paths=paths)


def test_damage_in_memory_after_a_block_was_sent_is_seen_by_the_next_receiver(
    source: WorkerService, takers: list[WorkerService]
) -> None:
    address, num_blocks = source.serve(), source.memory.num_blocks - 1
    assert pull(takers[0], address).num_blocks_of_run == (num_blocks,)
    overwrite(source, DAMAGED, bytes(block_bytes(source)))
    outcome = pull(takers[1], address)
    assert outcome.error == "a frame's checksum is wrong"
    assert outcome.num_checksum_failures == 1
    assert outcome.num_blocks_of_run[0] <= DAMAGED


def test_a_block_that_was_handed_out_anew_is_sent_with_the_checksum_of_what_it_holds_now(
    source: WorkerService, takers: list[WorkerService]
) -> None:
    address, num_blocks = source.serve(), source.memory.num_blocks - 1
    assert pull(takers[0], address).num_blocks_of_run == (num_blocks,)
    source.reused([BlockId(1)])
    overwrite(source, 0, content_of(100, block_bytes(source)))
    source.written(FIRST_GROUP, [(hash_of(0), BlockId(1))])
    outcome = pull(takers[1], address)
    assert (outcome.num_blocks_of_run, outcome.error) == ((num_blocks,), None)
    last = Place(BlockId(num_blocks), 0, SIZES["num_layers"])
    assert gather(takers[1].memory.groups[0], [last]) == content_of(100, block_bytes(source))


def overwrite(worker: WorkerService, index: int, payload: bytes) -> None:
    scatter(worker.memory.groups[0], [Place(BlockId(1 + index), 0, SIZES["num_layers"])], payload)


def block_bytes(worker: WorkerService) -> int:
    return worker.memory.groups[0].geometry.block_bytes
