"""Storing blocks at a worker of another process, and pulling them from there."""

import pytest
from tests.integration.transfer_host import Host
from tests.integration.transfer_peer import fill, hash_of
from tests.integration.transferring import assert_exactly_in_place, here, pull

from kvferry.proto.errors import MismatchError
from kvferry.proto.ids import FIRST_GROUP, BlockId
from kvferry.worker.pull import BlockRun
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_client import TransferClient

PAGE_BYTES_PER_HEAD_SIZE = 16


def store_all(worker: WorkerService, address: str) -> int:
    hashes = [hash_of(index) for index in range(worker.memory.num_blocks - 1)]
    client = TransferClient()
    try:
        return client.store(
            address,
            BlockRun(
                group_id=FIRST_GROUP,
                hashes=hashes,
                block_ids=[BlockId(index + 1) for index in range(len(hashes))],
            ),
            identity=worker.identity,
            memory=worker.memory,
            timeout_s=20.0,
        )
    finally:
        client.close()


def test_stored_blocks_can_be_pulled_by_another_worker(host: Host) -> None:
    store = host.open(empty=True)
    with here() as writer, here() as reader:
        fill(writer)
        assert pull(reader, store).num_blocks_of_run == (0,)
        assert store_all(writer, store) == 8
        assert pull(reader, store).num_blocks_of_run == (8,)
        assert_exactly_in_place(reader, 8)


def test_a_worker_that_takes_no_stores_says_so(host: Host) -> None:
    plain = host.open()
    with here() as writer, pytest.raises(MismatchError, match="takes no stores"):
        store_all(writer, plain)


@pytest.mark.parametrize("heads_more", [-1, 0, 1])
def test_blocks_around_the_default_message_limit_arrive_and_can_be_stored(
    host: Host, heads_more: int
) -> None:
    head_size = (4 << 20) // PAGE_BYTES_PER_HEAD_SIZE + heads_more
    sizes = {"num_blocks": 3, "num_layers": 1, "head_size": head_size}
    store = host.open(empty=True, **sizes)
    with here(**sizes) as worker, here(**sizes) as reader:
        fill(worker)
        assert worker.memory.groups[0].geometry.block_bytes == (4 << 20) + 16 * heads_more
        assert store_all(worker, store) == 2
        assert pull(reader, store).num_blocks_of_run == (2,)
        assert_exactly_in_place(reader, 2)
