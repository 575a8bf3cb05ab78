"""What both sides of a transfer count of it, by each path, also when it fails."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from tests.integration.transfer_peer import PeerService, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.ids import FIRST_GROUP, BlockId
from kvferry.proto.v1 import transfer_pb2_grpc
from kvferry.worker import bulk_server
from kvferry.worker.paths import Path
from kvferry.worker.pull import BlockRun, PullOutcome
from kvferry.worker.stats import CountedPath, Direction, TransferCounts
from kvferry.worker.transfer_wire import fetch_ask_to_proto, make_fetch_ask

NUM_BLOCKS, BLOCK_BYTES = 4, 2 * 16 * 8
RUN = BlockRun(
    group_id=FIRST_GROUP,
    hashes=[hash_of(index) for index in range(NUM_BLOCKS)],
    block_ids=[BlockId(index + 1) for index in range(NUM_BLOCKS)],
)


@contextmanager
def peers(*paths: Path) -> Iterator[tuple[PeerService, PeerService]]:
    """A worker that wants blocks, and one that has them."""
    taker, source = (
        new_worker(number, num_blocks=NUM_BLOCKS + 1, num_layers=2, head_size=8, paths=paths)
        for number in (2, 1)
    )
    fill(source)
    try:
        yield taker, source
    finally:
        taker.stop()
        source.stop()


def pull(taker: PeerService, source: PeerService, *, incarnation: int = 1) -> PullOutcome:
    return pull_blocks(taker, source.serve(), [RUN], incarnation=incarnation)


def counts(worker: PeerService, direction: Direction) -> dict[CountedPath, TransferCounts]:
    """What a worker counts, by path, once its side of all transfers has ended."""
    deadline = time.monotonic() + 10.0
    while worker.stats().of(direction).num_in_progress:
        assert time.monotonic() < deadline, worker.stats()
        time.sleep(0.005)
    return {
        path: counts
        for (one, path), counts in worker.stats().transfers.items()
        if one == direction and counts != TransferCounts()
    }


def test_a_pull_is_counted_on_both_sides() -> None:
    with peers() as (taker, source):
        assert pull(taker, source).num_blocks_of_run == (NUM_BLOCKS,)
        pulled, served = counts(taker, "pulled"), counts(source, "served")
        assert (list(pulled), list(served)) == (["grpc"], ["grpc"])
        for one in (pulled["grpc"], served["grpc"]):
            assert (one.num_started, one.num_bytes) == (1, NUM_BLOCKS * BLOCK_BYTES)
            assert one.failures == {}
            assert 0.0 < one.seconds < 20.0
        assert taker.stats().num_blocks_pulled == NUM_BLOCKS
        assert counts(taker, "served") == counts(source, "pulled") == {}


@pytest.mark.parametrize(("path", "served_bytes"), [("bulk", NUM_BLOCKS * BLOCK_BYTES), ("shm", 0)])
def test_a_pull_is_counted_under_the_path_it_took(
    path: Path, served_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    with peers(path) as (taker, source):
        assert pull(taker, source).num_blocks_of_run == (NUM_BLOCKS,)
        pulled, served = counts(taker, "pulled"), counts(source, "served")
        assert (list(pulled), list(served)) == ([path], [path])
        assert (pulled[path].num_started, served[path].num_started) == (1, 1)
        assert pulled[path].num_bytes == NUM_BLOCKS * BLOCK_BYTES
        assert served[path].num_bytes == served_bytes
        assert pulled[path].failures == served[path].failures == {}


def test_a_path_that_cannot_be_taken_is_a_failure_and_another_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    with peers("bulk") as (taker, source):
        address = source.serve()
        assert source._server is not None
        assert source._server._bulk is not None
        source._server._bulk.close()
        assert pull_blocks(taker, address, [RUN]).num_blocks_of_run == (NUM_BLOCKS,)
        pulled = counts(taker, "pulled")
        assert pulled["bulk"].failures == {"PathUnusableError": 1}
        assert (pulled["grpc"].num_bytes, pulled["grpc"].failures) == (
            NUM_BLOCKS * BLOCK_BYTES,
            {},
        )


def test_a_refused_pull_is_a_failure_of_both_sides() -> None:
    with peers() as (taker, source):
        assert pull(taker, source, incarnation=7).error_type == "StaleError"
        for one in (counts(taker, "pulled")["grpc"], counts(source, "served")["grpc"]):
            assert (one.num_started, one.num_bytes) == (1, 0)
            assert one.failures == {"StaleError": 1}


def test_what_a_source_lacks_is_a_failure_of_the_one_that_wanted_it() -> None:
    with peers() as (taker, source):
        source.reused([BlockId(3)])
        assert pull(taker, source).num_blocks_of_run == (2,)
        pulled = counts(taker, "pulled")["grpc"]
        assert (pulled.num_bytes, pulled.failures) == (2 * BLOCK_BYTES, {"NotFoundError": 1})
        assert counts(source, "served")["grpc"].failures == {}


def test_a_corrupt_frame_is_a_failure_of_its_receiver() -> None:
    with peers() as (taker, source):
        source.behaviour = "corrupt"  # in the third block
        assert pull(taker, source).num_blocks_of_run == (2,)
        pulled = counts(taker, "pulled")["grpc"]
        assert (pulled.num_bytes, pulled.failures) == (2 * BLOCK_BYTES, {"TransferError": 1})
        assert taker.stats().num_checksum_failures == 1
        assert source.stats().num_checksum_failures == 0


def test_a_receiver_that_leaves_early_is_a_failure_of_the_sender() -> None:
    with peers() as (_, source):
        source.behaviour = "slow"
        with grpc.insecure_channel(source.serve()) as channel:
            ask = fetch_ask_to_proto(make_fetch_ask(source.identity, RUN.hashes))
            call = transfer_pb2_grpc.TransferStub(channel).Fetch(ask, timeout=10.0)
            next(call)
            assert source.stats().of("served").num_in_progress == 1
            call.cancel()
            served = counts(source, "served")["grpc"]
        assert served.failures == {"Cancelled": 1}
        assert served.num_bytes < NUM_BLOCKS * BLOCK_BYTES


def test_a_call_that_is_refused_at_the_door_is_counted_too() -> None:
    with peers() as (_, source), grpc.insecure_channel(source.serve()) as channel:
        ask = fetch_ask_to_proto(make_fetch_ask(source.identity, RUN.hashes))
        with pytest.raises(grpc.RpcError):
            next(transfer_pb2_grpc.TransferStub(channel).Fetch(ask))
        assert counts(source, "served")["grpc"].failures == {"BadInputError": 1}
