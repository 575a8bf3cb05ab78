"""Faults of a transfer by every path, seen from both sides: what is counted, and that all is back.

`docs/testing.md` has the table of faults, paths and tests.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from tests.arenas import needs_arenas
from tests.integration.transfer_host import SIZES
from tests.integration.transfer_peer import PeerService, fill, hash_of, new_worker
from tests.integration.transferring import assert_exactly_in_place, here, pull

from kvferry.proto.v1 import transfer_pb2_grpc
from kvferry.worker import bulk_server, peer_memory, transfer_server
from kvferry.worker.frames import Frame, Header
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.stats import CountedPath, Direction
from kvferry.worker.transfer_server import TransferServer
from kvferry.worker.transfer_wire import encode_header, fetch_ask_to_proto, make_fetch_ask

by_every_path = pytest.mark.parametrize("path", ["grpc", "bulk"])
BLOCK_BYTES = 2048

# Pulls 64 blocks by each path at once, from the sources named by "path=address".
RECEIVER = """
import sys, threading
from tests.integration.transferring import here, pull
def fetch(path, address):
    with here(paths=() if path == "grpc" else (path,), num_blocks=65) as worker:
        pull(worker, address)
for named in sys.argv[1:]:
    threading.Thread(target=fetch, args=named.split("=")).start()
"""


class Holding(PeerService):
    """With the behaviour "hold" it sends two blocks and the rest once `go_on` is set."""

    go_on: threading.Event

    def _misbehave(self, frame: Frame) -> Frame:
        if self.behaviour == "hold" and frame.segments[0].hash_index == 2:
            assert self.go_on.wait(60.0)
        return super()._misbehave(frame)


@pytest.fixture(autouse=True)
def _bulk_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)


@contextmanager
def source(behaviour: str = "plain", num_blocks: int = 9) -> Iterator[tuple[Holding, str]]:
    """A sender in this process, and its address."""
    plain = new_worker(1, **SIZES | {"num_blocks": num_blocks}, paths=ALL_PATHS)
    worker = Holding(incarnation=plain.incarnation, memory=plain.memory, paths=ALL_PATHS)
    worker.go_on = threading.Event()
    worker.behaviour = behaviour
    fill(worker)
    try:
        yield worker, worker.serve()
    finally:
        worker.go_on.set()
        worker.stop()


def paths_of(path: CountedPath) -> tuple[Path, ...]:
    return () if path == "grpc" else (path,)


def wait_until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not is_true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.01)


def failures(worker: PeerService, direction: Direction, path: CountedPath) -> dict[str, int]:
    """What failed by a path, once nothing is in progress by any; nothing may have by another."""
    wait_until(lambda: worker.stats().of(direction).num_in_progress == 0)
    found = worker.stats().transfers[direction, path].failures
    assert worker.stats().of(direction).failures == found
    return found


def require_all_back(worker: PeerService) -> None:
    """No ticket of a sender is waited for any more, and it serves."""
    server = worker._server
    assert server is not None
    assert server._bulk is not None
    assert server._bulk._waiting == {}
    worker.behaviour = "plain"
    with here() as other:
        assert pull(other, server.address, indexes=range(2)).num_blocks_of_run == (2,)


# Of a receiver that has left, the sender learns in the call or by the socket, whichever is first.
LEFT = ({"Cancelled": 1}, {"UnavailableError": 1})


@by_every_path
@pytest.mark.parametrize(
    ("behaviour", "num_blocks", "pulled", "served"),
    [
        ("corrupt", 2, "TransferError", (*LEFT, {})),
        ("drop", 2, "TransferError", ({},)),
        ("reuse", 3, "NotFoundError", ({"NotFoundError": 1},)),
        ("broken", 2, "InvariantError", ({"ZeroDivisionError": 1},)),
    ],
)
def test_a_fault_of_the_sender_is_counted_by_path_and_leaves_the_verified_prefix(
    path: CountedPath,
    behaviour: str,
    num_blocks: int,
    pulled: str,
    served: tuple[dict[str, int], ...],
) -> None:
    with source(behaviour) as (sender, address), here(paths=paths_of(path)) as worker:
        outcome = pull(worker, address)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((num_blocks,), pulled)
        if behaviour != "drop":
            assert_exactly_in_place(worker, num_blocks)
        assert failures(worker, "pulled", path) == {pulled: 1}
        assert failures(sender, "served", path) in served
        require_all_back(sender)


@by_every_path
@pytest.mark.parametrize("fault", ["DeadlineError", "Cancelled"])
def test_a_pull_that_is_given_up_is_counted_by_path_and_frees_the_sender(
    path: CountedPath, fault: str
) -> None:
    with source("hold") as (sender, address), here(paths=paths_of(path)) as worker:
        cancel = threading.Event()
        if fault == "Cancelled":
            threading.Timer(0.2, cancel.set).start()
        started_s = time.monotonic()
        outcome = pull(
            worker, address, timeout_s=0.5 if fault == "DeadlineError" else 20.0, cancel=cancel
        )
        assert time.monotonic() - started_s < 3.0
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((2,), fault)
        assert_exactly_in_place(worker, 2)
        assert failures(worker, "pulled", path) == {fault: 1}
        sender.go_on.set()
        assert failures(sender, "served", path) in LEFT
        require_all_back(sender)


@needs_arenas
@pytest.mark.parametrize("fault", ["DeadlineError", "Cancelled"])
def test_a_copy_from_shared_memory_that_is_given_up_ends_before_its_next_frame(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel, settle = threading.Event(), OutgoingFrame.settle

    def give_up(frame: OutgoingFrame) -> int:
        if frame.segments[0].hash_index == 2:
            cancel.set() if fault == "Cancelled" else time.sleep(0.6)
        return settle(frame)

    monkeypatch.setattr(OutgoingFrame, "settle", give_up)
    monkeypatch.setattr(peer_memory, "DEFAULT_FRAME_BYTES", BLOCK_BYTES)
    with source() as (_, address), here(paths=("shm",)) as worker:
        outcome = pull(worker, address, timeout_s=0.5, cancel=cancel)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((3,), fault)
        assert outcome.num_bytes == 3 * BLOCK_BYTES
        assert failures(worker, "pulled", "shm") == {fault: 1}


@needs_arenas
def test_a_receiver_that_is_killed_gives_all_back_by_every_path_and_is_counted() -> None:
    with (
        source("hold", 65) as (call, call_address),
        source("hold", 65) as (bulk, bulk_address),
        source("hold", 65) as (shm, shm_address),
    ):
        named = [f"grpc={call_address}", f"bulk={bulk_address}", f"shm={shm_address}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, *named], env=environment)
        senders: tuple[tuple[Holding, CountedPath], ...] = (
            (call, "grpc"),
            (bulk, "bulk"),
            (shm, "shm"),
        )
        # The third block is held back: by then each has sent what comes before it.
        wait_until(
            lambda: all(one.stats().transfers["served", path].num_started for one, path in senders)
        )
        receiver.send_signal(signal.SIGKILL)
        receiver.wait()
        for one, path in senders:
            one.go_on.set()
            # Of memory that was handed out the sender has no part in the copy.
            assert failures(one, "served", path) in (({},) if path == "shm" else LEFT)
            require_all_back(one)


def test_a_receiver_that_shows_its_ticket_and_never_reads_is_ended_and_counted() -> None:
    worker = new_worker(1, num_blocks=17, num_layers=4, head_size=16384)
    fill(worker)
    server = TransferServer(worker, bind="127.0.0.1", insecure=False, stall_s=0.5)
    hashes = [hash_of(index) for index in range(16)]
    ask = replace(make_fetch_ask(worker.identity, hashes), paths=("bulk",))
    try:
        with grpc.insecure_channel(server.address) as channel:
            call = transfer_pb2_grpc.TransferStub(channel).Fetch(
                fetch_ask_to_proto(ask), timeout=30.0
            )
            offer = next(call).header.bulk
            with socket.create_connection(("127.0.0.1", offer.port)) as unread:
                unread.sendall(offer.ticket)
                started_s = time.monotonic()
                with pytest.raises(grpc.RpcError):
                    next(call)
                assert time.monotonic() - started_s < 5.0
        assert failures(worker, "served", "bulk") in LEFT
        assert server._bulk is not None
        assert server._bulk._waiting == {}
    finally:
        server.stop()
        worker.stop()


@needs_arenas
@pytest.mark.parametrize("num_announced", [7, 9])
def test_an_offer_of_other_blocks_than_are_announced_is_refused_before_any_copy(
    num_announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = encode_header

    def lie(header: Header) -> bytes:
        return encode(replace(header, num_found=num_announced))

    monkeypatch.setattr(transfer_server, "encode_header", lie)
    with source() as (_, address), here(paths=("shm",)) as worker:
        outcome = pull(worker, address)
        assert (outcome.num_blocks_of_run, outcome.num_bytes) == ((0,), 0)
        assert (outcome.error_type, outcome.error) == (
            "TransferError",
            f"an offer of other blocks than are announced; given: 8; allowed: {num_announced}",
        )
