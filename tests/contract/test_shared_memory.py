"""Blocks that the receiver copies itself out of a peer's memory: right bytes, or none."""

import logging
import mmap
import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path as File

import numpy as np
import pytest
import torch
from tests.arenas import needs_arenas
from tests.contract.exchange import exchanging
from tests.contract.test_pull_layouts_failures import CUT, CUT_TOO, ONE
from tests.integration import transferring
from tests.integration.transfer_host import SIZES, new_host
from tests.integration.transfer_peer import content_of, fill, hash_of, new_worker
from tests.integration.transferring import pull
from tests.pulling import pull_blocks

from kvferry.proto.errors import MismatchError
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation
from kvferry.worker import chunks, memory_door, peer_memory, service
from kvferry.worker.arena import Arena, map_arena, touch, written_extents
from kvferry.worker.block_io import gather
from kvferry.worker.fetch_terms import Peer
from kvferry.worker.frames import Place
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.peer_memory import attach
from kvferry.worker.pull import BlockRun, PullOutcome
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_client import TransferClient

pytestmark = needs_arenas

NUM_BLOCKS = SIZES["num_blocks"] - 1


def pair() -> AbstractContextManager[tuple[WorkerService, WorkerService, str]]:
    return transferring.pair(["shm"])


def assert_in_place(worker: WorkerService, num_blocks: int) -> None:
    (group,) = worker.memory.groups
    for index in range(num_blocks):
        found = gather(group, [Place(BlockId(NUM_BLOCKS - index), 0, group.geometry.num_layers)])
        assert found == content_of(index, group.geometry.block_bytes)
    assert worker.residency.num_blocks() == num_blocks


def test_blocks_are_copied_without_a_byte_of_them_in_the_call() -> None:
    with pair() as (source, taker, address):
        assert pull(taker, address) == PullOutcome(num_blocks_of_run=(8,), num_bytes=8 * 2048)
        assert_in_place(taker, 8)
        served = source.stats().of("served")
        assert (served.num_started, served.num_bytes) == (1, 0)


@pytest.mark.parametrize("lost", [0, 3, 7])
def test_a_block_that_is_handed_out_anew_during_the_copy_ends_it_before_that_block(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    with pair() as (source, taker, address):
        settle = OutgoingFrame.settle

        def overtaken(frame: OutgoingFrame) -> int:
            # The bytes are copied; before anybody looks, the block gets other ones.
            source.reused([BlockId(lost + 1)])
            return settle(frame)

        monkeypatch.setattr(OutgoingFrame, "settle", overtaken)
        outcome = pull(taker, address)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((lost,), "NotFoundError")
        assert outcome.error is not None
        assert f"hash_index={lost}" in outcome.error
        assert_in_place(taker, lost)


def test_with_other_layouts_a_block_lost_at_one_rank_shortens_what_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 20 tokens of two heads, K and V of 8 bytes each.
    monkeypatch.setattr(chunks, "CHUNK_PAGE_BYTES", 20 * 2 * 2 * 8)
    with exchanging(CUT, CUT_TOO, num_blocks=5, paths=["shm"]) as exchange:
        exchange.lose(1, 13)
        outcomes = [exchange.pull(rank) for rank in range(2)]
        assert [one.num_blocks_of_run for one in outcomes] == [(5,), (2,)]
        exchange.assert_holds(0, 5)
        exchange.assert_holds(1, 2, only=False)


@pytest.mark.parametrize("theirs", ["LSBNH", "BLSNH", "LBHNS"])
@pytest.mark.parametrize("ours", ["LSBNH", "BLSNH", "LBHNS"])
def test_any_memory_order_can_be_copied_into_any_other(theirs: str, ours: str) -> None:
    source, destination = (replace(ONE, memory=order) for order in (theirs, ours))
    with exchanging(source, destination, num_blocks=5, paths=["shm"]) as exchange:
        assert exchange.pull(0).num_blocks_of_run == (5,)
        exchange.assert_holds(0, 5)


def test_a_reader_never_counts_bytes_that_were_written_meanwhile() -> None:
    """One block is rewritten all the time; whatever a reader counts is of one writing."""
    with pair() as (source, taker, address):
        stop = threading.Event()

        def write(value: int) -> None:
            source.reused([BlockId(1)])
            for layer in source.memory.layers:
                layer[:, 1] = float(value)
            source.written(FIRST_GROUP, [(hash_of(0), BlockId(1))])

        def rewrite() -> None:
            value = 0
            while not stop.wait(0.003):
                value = (value + 1) % 100
                write(value)

        # What the pair began with is not of one value, and the reader may come first.
        write(0)
        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            num_counted = 0
            for _ in range(2000):
                run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(0)], block_ids=[BlockId(5)])
                outcome = pull_blocks(taker, address, [run])
                if outcome.num_blocks_of_run == (1,):
                    values = torch.stack([layer[:, 5] for layer in taker.memory.layers])
                    assert torch.equal(values, values.flatten()[0].expand_as(values))
                    num_counted += 1
                if num_counted >= 20:
                    break
            assert num_counted >= 20
        finally:
            stop.set()
            writer.join()


def test_another_life_at_the_same_address_is_mapped_anew() -> None:
    with pair() as (source, taker, address):
        assert pull(taker, address).num_blocks_of_run == (8,)
        source.stop()
        port = int(address.rpartition(":")[2])
        with pair() as (_, _, _):
            second = new_worker(9, **SIZES, paths=["shm"])
            fill(second)
            try:
                assert second.serve(port=port) == address
                taker.reused(BlockId(block_id) for block_id in range(1, 9))
                for layer in taker.memory.layers:
                    layer.zero_()
                assert pull(taker, address, incarnation=1).error_type == "StaleError"
                assert pull(taker, address, incarnation=9).num_blocks_of_run == (8,)
                assert_in_place(taker, 8)
            finally:
                second.stop()


def test_a_caller_from_another_place_gets_frames_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (source, taker, address):
        monkeypatch.setattr(service, "this_place", lambda: "another/machine")
        assert pull(taker, address).num_blocks_of_run == (8,)
        assert_in_place(taker, 8)
        assert source.stats().of("served").num_bytes == 8 * 2048


@pytest.mark.parametrize("reason", ["gone", "other user", "other life"])
def test_memory_that_cannot_be_had_is_replaced_by_frames_and_that_is_said(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pair() as (source, taker, address):
        assert source._door is not None
        if reason == "gone":
            source._door.close()
        elif reason == "other user":
            monkeypatch.setattr(peer_memory, "peer_process", lambda _: (1, os.getuid() + 1))
        else:
            source._door._message = source._door._message.replace(b"\x01", b"\x02", 1)
        with caplog.at_level(logging.WARNING, "kvferry.worker.unusable_paths"):
            assert pull(taker, address).num_blocks_of_run == (8,)
            assert pull(taker, address).num_blocks_of_run == (8,)
        assert_in_place(taker, 8)
        records = [one for one in caplog.records if one.name.endswith("unusable_paths")]
        (line,) = [one.getMessage() for one in records]
        assert f"{address} cannot be reached by shm for 60 s" in line
        # The first call was in vain; after that nobody tried again.
        assert source.stats().of("served").num_started == 3


def test_another_user_gets_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (source, taker, address):
        assert source._door is not None
        monkeypatch.setattr(memory_door, "peer_process", lambda _: (1, os.getuid() + 1))
        with pytest.raises(MismatchError, match="given: 0 bytes"):
            attach(source._door.name, peer_of(taker, address))


def peer_of(taker: WorkerService, address: str) -> Peer:
    return Peer(
        address=address,
        identity=taker.identity,
        layout=taker.memory.layout,
        rank=0,
        incarnation=Incarnation(1),
    )


def test_what_is_handed_out_cannot_be_written_shrunk_or_grown() -> None:
    arena = Arena(3 * mmap.PAGESIZE)
    arena.bytes()[0] = 7
    for change in (0, mmap.PAGESIZE, 9 * mmap.PAGESIZE):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.fd, change)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(arena.fd, mmap.PAGESIZE)
    mapped = map_arena(arena.fd, 3 * mmap.PAGESIZE)
    assert mapped[0] == 7
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 8
    # The owner goes on writing, and readers see it.
    arena.bytes()[0] = 9
    assert mapped[0] == 9


def test_touching_what_was_written_takes_no_memory_for_the_rest() -> None:
    page = mmap.PAGESIZE
    arena = Arena(1000 * page)
    assert written_extents(arena.fd) == []
    arena.bytes()[500 * page : 502 * page] = 7
    arena.bytes()[999 * page] = 7
    extents = written_extents(arena.fd)
    assert extents == [slice(500 * page, 502 * page), slice(999 * page, 1000 * page)]
    taken = os.fstat(arena.fd).st_blocks
    touch(map_arena(arena.fd, 1000 * page), extents)
    assert os.fstat(arena.fd).st_blocks == taken > 0


@pytest.mark.parametrize("size", [mmap.PAGESIZE, 3 * mmap.PAGESIZE])
def test_memory_that_is_too_small_or_not_sealed_is_not_mapped(size: int) -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        with pytest.raises(MismatchError, match=f"given: {size} bytes"):
            map_arena(descriptor, 2 * mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def test_a_mapping_outlives_a_killed_owner_and_nothing_named_is_left(tmp_path: File) -> None:
    with new_host() as doomed:
        address = doomed.open()
        taker = new_worker(50, **SIZES, paths=["shm"])
        try:
            assert pull(taker, address).num_blocks_of_run == (8,)
            assert isinstance(taker._fetcher, TransferClient)
            (memory,) = [one.memory for one in taker._fetcher._memories._attached.values()]
            before = np.array(memory.groups[0].sides[0][0])
            doomed.process.kill()
            doomed.process.wait()
            assert np.array_equal(memory.groups[0].sides[0][0], before)
            assert pull(taker, address).error_type == "UnavailableError"
        finally:
            taker.stop()
    assert [one for one in os.listdir("/dev/shm") if "kvferry" in one] == []


def test_descriptors_are_given_back_with_the_memory() -> None:
    code = """
import contextlib, gc, os, time
from tests.integration.transfer_host import SIZES
from tests.integration.transfer_peer import fill, new_worker
from tests.integration.transferring import pull
counts = []
def num_memfds():
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink("/proc/self/fd/" + name))
    return sum("memfd" in link for link in links)
for _ in range(4):
    source, taker = (new_worker(one, **SIZES, paths=["shm"]) for one in (1, 2))
    fill(source)
    assert pull(taker, source.serve()).num_blocks_of_run == (8,)
    taker.stop(); source.stop()
    del source, taker
    # The server's threads end a little later.
    end_s = time.monotonic() + 10.0
    while num_memfds() and time.monotonic() < end_s:
        time.sleep(0.05)
        gc.collect()
    counts.append(num_memfds())
print(counts)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[0, 0, 0, 0]"
